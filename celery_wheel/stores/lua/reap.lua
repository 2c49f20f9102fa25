-- reap(limit, dead owners) → {tombstones left to delete: 1 or 0, owner, owner, …}: those that
-- have rows but no lease, after the leases of the dead and those that have run out were ended
--
--   line:…, owners, leases   read; ended leases are deleted
--   lines                    those that are empty are deleted
--   cancelled, seen          up to `limit` tombstones that have run out are deleted

local now, orphans = now_ms(), {0}
drains()
for _, ended in ipairs({args[2], redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)}) do
  for _, owner in ipairs(ended) do
    redis.call('HDEL', OWNERS, owner)
    redis.call('ZREM', LEASES, owner)
  end
end
for _, tombstones in ipairs({CANCELLED, SEEN}) do
  local old = redis.call('ZRANGEBYSCORE', tombstones, '-inf', now, 'LIMIT', 0, args[1])
  for _, name in ipairs(old) do
    redis.call('ZREM', tombstones, name)
  end
  if #old == args[1] then
    orphans[1] = 1
  end
end
local known = {}
for _, line in ipairs(redis.call('SMEMBERS', LINES)) do
  local owner = string.sub(line, 2)
  local owned = string.sub(line, 1, 1) ~= 'f'
  if redis.call('EXISTS', base .. 'line:' .. line) == 0 then
    redis.call('SREM', LINES, line)
  elseif owned and not known[owner] and redis.call('HEXISTS', OWNERS, owner) == 0 then
    known[owner] = true
    orphans[#orphans + 1] = owner
  end
end
return orphans
