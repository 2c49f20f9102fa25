-- reschedule(id, due_ms) → how many pending rows of the id there are, all due then now
--
--   ids                               read
--   rows, line:f/p…, lines, expires   written

local count = 0
drains()
for _, key in ipairs(keys_of(args[1])) do
  local row = row_of(key)
  if row[STATE] == PENDING then
    count = count + 1
    if row[DUE] ~= args[2] then
      change(key, row, {[DUE] = args[2], [VERSION] = row[VERSION] + 1, [OWNER] = false})
    end
  end
end
return count
