-- Finds out, before anything is claimed, whether this user may call each command that the steps call:
-- a step that is refused in its middle would leave a record without an end. The probe itself finds
-- nothing to change, but for its last two commands.
--
-- KEYS: a record and a set that are nobody's.

local RECORD, SET = KEYS[1], KEYS[2]
redis.call('TIME')
redis.call('HMGET', RECORD, 'token')
redis.call('HGET', RECORD, 'token')
redis.call('HDEL', RECORD, 'token')
redis.call('PTTL', RECORD)
redis.call('EXISTS', RECORD)
redis.call('PEXPIRE', RECORD, 1000)
redis.call('PEXPIREAT', RECORD, 1)
redis.call('DEL', RECORD)
redis.call('SET', RECORD, '', 'XX', 'PX', 1000)
redis.call('ZSCORE', SET, '')
redis.call('ZCARD', SET)
redis.call('ZRANGE', SET, -1, -1, 'WITHSCORES')
redis.call('ZRANGEBYSCORE', SET, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
redis.call('ZREMRANGEBYSCORE', SET, '-inf', 0)
redis.call('ZADD', SET, 'XX', 1, '')
redis.call('HSET', RECORD, 'token', '')
redis.call('DEL', RECORD)
return {'done'}
