-- end_lease(owner) → nothing
--
--   owners, leases   written

redis.call('HDEL', OWNERS, args[1])
redis.call('ZREM', LEASES, args[1])
