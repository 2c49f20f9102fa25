-- confirm(owner, now_ms, {{key, version}, …}) → the keys that are dispatched to this owner
--
--   rows, cancelled                    read
--   rows, line:p<owner>, line:d<owner>,
--   lines, expires                     written

local owner, now, confirmed = args[1], args[2], {}
drains()
for _, ref in ipairs(args[3]) do
  local key = ref[1]
  local row = row_of(key)
  if row and row[OWNER] == owner and row[VERSION] == ref[2] then
    if row[STATE] == DISPATCHED then
      confirmed[#confirmed + 1] = key
    elseif row[DUE] <= now and not is_cancelled(row, now) then
      change(key, row, {[STATE] = DISPATCHED})
      confirmed[#confirmed + 1] = key
    end
  end
end
return confirmed
