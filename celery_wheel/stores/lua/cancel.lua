-- cancel(ids, stamps, keys, until_ms) → {key, row, key, row, …}: every row of these ids and
-- keys, as it was; the pending ones are deleted
--
--   ids, rows                                    read
--   cancelled                                    a tombstone of each id and stamp
--   rows, ids, stamp:…, line:…, lines, expires   pending rows are deleted

local answer, until_ms = {}, args[4]

local function cancel(key)
  local row, packed = row_of(key)
  if row then
    answer[#answer + 1] = key
    answer[#answer + 1] = packed
    if row[STATE] == PENDING then
      delete(key, row)
    end
  end
end

drains()
for _, stamp in ipairs(args[2]) do
  remember(CANCELLED, 's' .. stamp, until_ms)
end
for _, id in ipairs(args[1]) do
  remember(CANCELLED, 'i' .. id, until_ms)
  for _, key in ipairs(keys_of(id)) do
    cancel(key)
  end
end
for _, key in ipairs(args[3]) do
  cancel(key)
end
return answer
