-- How every step on a record begins, and what the steps share: this text stands before each of them.
--
-- Ground rules:
-- 1. KEYS: the record (a hash); of its shard the owners (a sorted set: owner -> until when it beats)
--    and the recalls (a sorted set: name of a record -> when it was forgotten or resolved). They are
--    in one slot, so that a step sees and changes them as one, in a cluster too.
-- 2. Time is this server's, in milliseconds, read within the step (rule 8).
-- 3. A record's end is the expiry of its key and stands nowhere else. What creates a record sets
--    its expiry in the same step (rule 7).
-- 4. The first command that writes is one that a server that is full, read-only or without its
--    replicas refuses; after it none fails. So a step that was refused has changed nothing.
-- 5. A token is a text, the owner's 16 digits first; it is compared and never calculated with.

local RECORD, OWNERS, RECALLS = KEYS[1], KEYS[2], KEYS[3]

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local fields = redis.call('HMGET', RECORD, 'format', 'token', 'fingerprint', 'state', 'since', 'due',
  'waited')
local format, token, fingerprint, kept = fields[1], fields[2], fields[3], fields[4]
local since, due, waited = tonumber(fields[5]), tonumber(fields[6]), fields[7]
if format and format ~= '1' then
  return {'format', format}
end

-- Until when the owner of a token beats; nil if this server has not heard of it lately.
local function alive_until(of)
  return tonumber(redis.call('ZSCORE', OWNERS, string.sub(of, 1, 16)) or nil)
end

local function is_open()
  return kept == 'in-flight' or kept == 'held'
end

-- What became of the record, as a caller sees it, and until when that lasts (rule 9).
local function state()
  local ends = now + redis.call('PTTL', RECORD)
  if kept ~= 'in-flight' then
    return kept, ends
  end
  local alive = alive_until(token) or 0
  if alive <= now then
    return 'lapsed', ends
  elseif due <= now then
    return 'held', ends
  end
  return 'in-flight', math.min(due, alive)
end

local function found()
  local is, till = state()
  local outcome = is == 'completed' and redis.call('HGET', RECORD, 'outcome')
  return {'found', is, token, fingerprint, now - since, till - now, outcome}
end

-- The step of a token that is stale; and whether this server should still have known it: its owner
-- has not lapsed, and nobody has forgotten or resolved the record lately.
local function lost(stale)
  local alive = alive_until(stale)
  local explained = (alive and alive <= now) or redis.call('ZSCORE', RECALLS, RECORD)
  return {'lost', now, explained and 1 or 0, token and found()}
end

-- Wakes those who wait for the record, if anybody does. Nobody depends on it, so that a user who may
-- not publish only makes them wait for their next look.
local function tell()
  if waited then
    redis.pcall('PUBLISH', RECORD, '')
  end
end

-- Notes that the record is forgotten or resolved (rule 13). The times grow, whatever the clock does.
local TOLD, ENOUGH = 600000, 100000
local function recall()
  local last = tonumber(redis.call('ZRANGE', RECALLS, -1, -1, 'WITHSCORES')[2]) or 0
  redis.call('ZADD', RECALLS, math.max(now, last + 1), RECORD)
  redis.call('PEXPIRE', RECALLS, TOLD)
  -- Those of the last two minutes stay, however many they are.
  local many = redis.call('ZCARD', RECALLS) > ENOUGH
  redis.call('ZREMRANGEBYSCORE', RECALLS, '-inf', now - (many and 120000 or TOLD))
end
