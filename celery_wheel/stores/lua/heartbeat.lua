-- heartbeat(owner, who it is, ttl_ms) → 1 where a lease was on record, 0 where one was started
--
--   owners, leases   written

drains()
local held = redis.call('HEXISTS', OWNERS, args[1])
redis.call('HSET', OWNERS, args[1], args[2])
redis.call('ZADD', LEASES, now_ms() + args[3], args[1])
return held
