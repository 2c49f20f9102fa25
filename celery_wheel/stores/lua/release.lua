-- release(owner, keys, redelivered) → how many of these rows were this owner's, and are free now
--
--   rows, line:p<owner>, line:d<owner>, line:f…, lines, expires   written

local count = 0
drains()
for _, key in ipairs(args[2]) do
  local row = row_of(key)
  if row and row[OWNER] == args[1] then
    free(key, row, args[3])
    count = count + 1
  end
end
return count
