-- What was forgotten or resolved in a shard after a point, and the present point (rule 13).
--
-- KEYS: the recalls of the shard. ARGV: the point, or '' for the present one alone.

local RECALLS = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local last = tonumber(redis.call('ZRANGE', RECALLS, -1, -1, 'WITHSCORES')[2]) or 0
-- What is noted later, in this millisecond too, is noted after this point.
local point = math.max(now - 1, last)
if ARGV[1] == '' then
  return {'recalls', point, {}}
end
-- A point in the future: the clock was set back since, or another server has taken this one's place.
local from = tonumber(ARGV[1]) > point and '-inf' or '(' .. ARGV[1]
local MOST = 10000
local told = redis.call('ZRANGEBYSCORE', RECALLS, from, '+inf', 'WITHSCORES', 'LIMIT', 0, MOST)
local names = {}
for at = 1, #told, 2 do
  names[#names + 1] = told[at]
end
if #names == MOST then
  point = tonumber(told[#told])
end
return {'recalls', point, names}
