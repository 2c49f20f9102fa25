-- claim(owner, until_ms, limit, look, queues or nil, unknown names, after_due or nil,
-- after_member) → {last_due, last_member, key, row, key, row, …}
--
-- Takes up to `limit` of the `look` rows that are first. The last of these is told, for the
-- next call to go on after it; '' where there are not as many.
--
--   lines             read where queues is nil
--   line:f…, rows     read; rows that are taken move to line:p<owner>

local owner, limit, look, unknown, lines = args[1], args[3], args[4], {}, {}
for _, name in ipairs(args[6]) do
  unknown[name] = true
end
if args[5] then
  for _, queue in ipairs(args[5]) do
    lines[#lines + 1] = 'f' .. queue
  end
else
  for _, line in ipairs(redis.call('SMEMBERS', LINES)) do
    if string.sub(line, 1, 1) == 'f' then
      lines[#lines + 1] = line
    end
  end
end

local entries = scan(lines, args[7], args[8], args[2] + 1, look)
local last, answer = entries[look], {'', ''}
if last then
  answer = {string.format('%.0f', last[1]), last[2]}
end
drains()
for _, entry in ipairs(entries) do
  if limit == 0 then
    break
  end
  local key = string.sub(entry[2], 9)
  local row = row_of(key)
  if not unknown[row[NAME]] then
    answer[#answer + 1] = key
    answer[#answer + 1] = change(key, row, {[OWNER] = owner})
    limit = limit - 1
  end
end
return answer
