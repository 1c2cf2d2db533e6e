-- Shows that an owner is alive (rules 9, 10), and tells whether it was so before.
--
-- KEYS: the owners of a shard. ARGV: owner, lease in milliseconds.

local OWNERS = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- An owner is remembered for an hour after its lapse.
local MEMORY = 3600000

local before = redis.call('ZSCORE', OWNERS, ARGV[1])
redis.call('ZADD', OWNERS, now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', OWNERS, '-inf', now - MEMORY)
local last = redis.call('ZRANGE', OWNERS, -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIREAT', OWNERS, last + MEMORY)
if before and tonumber(before) <= now then
  return {'lapsed'}
end
return {'done'}
