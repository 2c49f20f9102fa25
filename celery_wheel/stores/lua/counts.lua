-- counts(edges) → {pending, dispatched, owned, oldest due of a pending row or '', pending rows
-- that are due before the first edge, …, before the last edge}
--
--   lines, line:…   read

local dispatched, owned, pending, oldest, below = 0, 0, 0, nil, {}
for at = 1, #args[1] do
  below[at] = 0
end
for _, name in ipairs(redis.call('SMEMBERS', LINES)) do
  local line, letter = base .. 'line:' .. name, string.sub(name, 1, 1)
  local count = redis.call('ZCARD', line)
  if letter ~= 'f' then
    owned = owned + count
  end
  if letter == 'd' then
    dispatched = dispatched + count
  elseif count > 0 then
    pending = pending + count
    local first = tonumber(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2])
    oldest = math.min(oldest or first, first)
    for at, edge in ipairs(args[1]) do
      below[at] = below[at] + redis.call('ZCOUNT', line, '-inf', '(' .. string.format('%.0f', edge))
    end
  end
end
oldest = oldest and string.format('%.0f', oldest) or ''
return {pending, dispatched, owned, oldest, unpack(below)}
