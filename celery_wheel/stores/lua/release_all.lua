-- release_all(owner, limit, orphans) → how many rows of this owner were freed, up to `limit`
--
-- With `orphans` nothing where the owner has a lease: it may have come back meanwhile.
--
--   owners                                                        read
--   rows, line:p<owner>, line:d<owner>, line:f…, lines, expires   written

local owner, limit, count = args[1], args[2], 0
if args[3] and redis.call('HEXISTS', OWNERS, owner) == 1 then
  return 0
end
drains()
for _, letter in ipairs({'d', 'p'}) do
  if count < limit then
    local line = base .. 'line:' .. letter .. owner
    for _, member in ipairs(redis.call('ZRANGE', line, 0, limit - count - 1)) do
      local key = string.sub(member, 9)
      free(key, row_of(key), false)
      count = count + 1
    end
  end
end
return count
