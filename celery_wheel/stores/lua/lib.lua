-- What every script begins with; it is put before each when that is loaded.
--
--   KEYS[1]  "{namespace}:", the beginning of every key: all lie in one hash slot
--   ARGV[1]  the script's arguments, one msgpack array: args[1], args[2], …
--
--   key              type  holds
--   rows             hash  16-byte key of a task → its row
--   ids              hash  task id → the keys of its rows, 16 bytes each, one after the other
--   stamp:<stamp>    set   keys of the rows that carry the stamp
--   line:<line>      zset  arrival (8 bytes) and key → due_ms. Each row is in exactly one line:
--                          f<queue>   pending, unowned
--                          p<owner>   pending, owned
--                          d<owner>   dispatched
--   lines            set   the lines; those that are empty are taken off by reap
--   expires          zset  key → expires_ms, of pending rows that have one
--   cancelled        zset  i<id> or s<stamp> → until_ms: tombstones
--   seen             zset  key → until_ms: tombstones of settled messages
--   owners           hash  owner → who it is (msgpack)
--   leases           zset  owner → until_ms of the server's clock
--   meta             hash  schema → version of this layout
--
-- A row is a msgpack array, false where a field has no value. Redis undoes nothing when a
-- script fails, so none may fail after its first write: that is the only one that can be
-- refused (no memory, read-only server).

local base, args = KEYS[1], cmsgpack.unpack(ARGV[1])
local ROWS, IDS, LINES, EXPIRES = base .. 'rows', base .. 'ids', base .. 'lines', base .. 'expires'
local CANCELLED, SEEN = base .. 'cancelled', base .. 'seen'
local OWNERS, LEASES, META = base .. 'owners', base .. 'leases', base .. 'meta'

-- The fields of a row that scripts look at; the twelfth is for Python alone.
local STATE, OWNER, DUE, VERSION, REDELIVERED, QUEUE = 1, 2, 3, 4, 5, 6
local ID, NAME, EXPIRES_MS, STAMPS, ARRIVAL = 7, 8, 9, 10, 11
local PENDING, DISPATCHED = 0, 1

-- Let this script write even when memory is used up: what takes tasks out of the store has to
-- go on then. Only a script's first write is refused, and this one needs no memory.
local function drains()
  redis.call('SREM', LINES, '')
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function row_of(key)
  local packed = redis.call('HGET', ROWS, key)
  return packed and cmsgpack.unpack(packed), packed
end

local function line_of(row)
  if row[STATE] == DISPATCHED then
    return 'd' .. row[OWNER]
  elseif row[OWNER] then
    return 'p' .. row[OWNER]
  end
  return 'f' .. row[QUEUE]
end

local noted = {}

local function enter(key, row)
  local line = line_of(row)
  redis.call('ZADD', base .. 'line:' .. line, row[DUE], row[ARRIVAL] .. key)
  if not noted[line] then
    noted[line] = true
    redis.call('SADD', LINES, line)
  end
  if row[EXPIRES_MS] and row[STATE] == PENDING then
    redis.call('ZADD', EXPIRES, row[EXPIRES_MS], key)
  end
end

local function leave(key, row)
  redis.call('ZREM', base .. 'line:' .. line_of(row), row[ARRIVAL] .. key)
  if row[EXPIRES_MS] then
    redis.call('ZREM', EXPIRES, key)
  end
end

-- Change fields of a row: {[STATE] = …}. Returns the new row, packed.
local function change(key, row, fields)
  leave(key, row)
  for field, value in pairs(fields) do
    row[field] = value
  end
  enter(key, row)
  local packed = cmsgpack.pack(row)
  redis.call('HSET', ROWS, key, packed)
  return packed
end

local function free(key, row, redelivered)
  if redelivered or row[STATE] == DISPATCHED then
    redelivered = 1
  else
    redelivered = row[REDELIVERED]
  end
  change(key, row, {[STATE] = PENDING, [OWNER] = false, [REDELIVERED] = redelivered})
end

local function keys_of(id)
  local joined, keys = redis.call('HGET', IDS, id), {}
  for at = 1, joined and #joined or 0, 16 do
    keys[#keys + 1] = string.sub(joined, at, at + 15)
  end
  return keys
end

local function insert(key, row, packed)
  redis.call('HSET', ROWS, key, packed)
  redis.call('HSET', IDS, row[ID], (redis.call('HGET', IDS, row[ID]) or '') .. key)
  for _, stamp in ipairs(row[STAMPS] or {}) do
    redis.call('SADD', base .. 'stamp:' .. stamp, key)
  end
  enter(key, row)
end

local function delete(key, row)
  redis.call('HDEL', ROWS, key)
  leave(key, row)
  local others = {}
  for _, other in ipairs(keys_of(row[ID])) do
    if other ~= key then
      others[#others + 1] = other
    end
  end
  if #others == 0 then
    redis.call('HDEL', IDS, row[ID])
  else
    redis.call('HSET', IDS, row[ID], table.concat(others))
  end
  for _, stamp in ipairs(row[STAMPS] or {}) do
    redis.call('SREM', base .. 'stamp:' .. stamp, key)
  end
end

-- Note a tombstone; the one that lasts longer counts.
local function remember(tombstones, name, until_ms)
  local known = redis.call('ZSCORE', tombstones, name)
  if not known or tonumber(known) < until_ms then
    redis.call('ZADD', tombstones, until_ms, name)
  end
end

local function holds(tombstones, name, at_ms)
  local until_ms = redis.call('ZSCORE', tombstones, name)
  return until_ms and tonumber(until_ms) > at_ms
end

local function is_cancelled(row, at_ms)
  if holds(CANCELLED, 'i' .. row[ID], at_ms) then
    return true
  end
  for _, stamp in ipairs(row[STAMPS] or {}) do
    if holds(CANCELLED, 's' .. stamp, at_ms) then
      return true
    end
  end
  return false
end

-- Order of members that have the same due. Lua's own < goes by the server's locale.
local function before(one, other)
  for at = 1, math.min(#one, #other) do
    local a, b = string.byte(one, at), string.byte(other, at)
    if a ~= b then
      return a < b
    end
  end
  return #one < #other
end

local function in_order(one, other)
  if one[1] ~= other[1] then
    return one[1] < other[1]
  end
  return before(one[2], other[2])
end

-- The rank in a line of the first entry after (due, member).
local function rank_after(line, due, member)
  local low = redis.call('ZCOUNT', line, '-inf', '(' .. string.format('%.0f', due))
  local high = low + redis.call('ZCOUNT', line, due, due)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if before(member, redis.call('ZRANGE', line, middle, middle)[1]) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Up to `limit` entries {due, member} of some lines in order: after (after_due, after_member)
-- where that is given, and below `stop`. Costs by `limit` and the number of lines.
local function scan(lines, after_due, after_member, stop, limit)
  local found = {}
  for _, name in ipairs(lines) do
    local line, first = base .. 'line:' .. name, 0
    if after_due then
      first = rank_after(line, after_due, after_member)
    end
    local entries = redis.call('ZRANGE', line, first, first + limit - 1, 'WITHSCORES')
    for at = 1, #entries, 2 do
      local due = tonumber(entries[at + 1])
      if stop and due >= stop then
        break
      end
      found[#found + 1] = {due, entries[at]}
    end
    if #lines > 1 and #found > 1 then
      table.sort(found, in_order)
      for at = #found, limit + 1, -1 do
        found[at] = nil
      end
      if #found == limit then
        stop = found[limit][1] + 1
      end
    end
  end
  return found
end
