-- open(version) → the version of the layout that is there; a new place gets `version`.
--
--   meta  read; written where there is none

local found = redis.call('HGET', META, 'schema')
if not found then
  redis.call('HSET', META, 'schema', args[1])
  found = args[1]
end
return tonumber(found)
