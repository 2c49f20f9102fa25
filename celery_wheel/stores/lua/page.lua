-- page(owner or nil, queue or nil, after_due or nil, after_member, before_ms or nil, limit)
--   → {key, row, key, row, …} in order. Unowned rows of other queues are left out; owned ones
--   are not.
--
--   lines, line:…, rows   read

local owner, queue, lines, answer = args[1], args[2], {}, {}
if owner then
  lines = {'p' .. owner, 'd' .. owner}
else
  for _, line in ipairs(redis.call('SMEMBERS', LINES)) do
    if not queue or string.sub(line, 1, 1) ~= 'f' or line == 'f' .. queue then
      lines[#lines + 1] = line
    end
  end
end
for _, entry in ipairs(scan(lines, args[3], args[4], args[5], args[6])) do
  local key = string.sub(entry[2], 9)
  answer[#answer + 1] = key
  answer[#answer + 1] = redis.call('HGET', ROWS, key)
end
return answer
