-- put(now_ms, {{key, row}, …}) → one letter per row: n(ew), k(nown) or c(ancelled)
--
--   rows, seen, cancelled             read
--   rows, ids, stamp:…, line:f/p…,
--   lines, expires                    written for new ones

local now, answers = args[1], {}
for at, pair in ipairs(args[2]) do
  local key, packed = pair[1], pair[2]
  if redis.call('HEXISTS', ROWS, key) == 1 or holds(SEEN, key, now) then
    answers[at] = 'k'
  else
    local row = cmsgpack.unpack(packed)
    if is_cancelled(row, now) then
      answers[at] = 'c'
    else
      insert(key, row, packed)
      answers[at] = 'n'
    end
  end
end
return table.concat(answers)
