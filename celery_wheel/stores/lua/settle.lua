-- settle(keys, seen_until_ms or nil) → how many rows there were
--
--   rows, ids, stamp:…, line:…, lines, expires   rows are deleted
--   seen                                         a tombstone of each key

local count = 0
drains()
for _, key in ipairs(args[1]) do
  if args[2] then
    remember(SEEN, key, args[2])
  end
  local row = row_of(key)
  if row then
    delete(key, row)
    count = count + 1
  end
end
return count
