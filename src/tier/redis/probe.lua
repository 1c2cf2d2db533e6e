-- Finds out, before anything is claimed, whether this user may call each command that the steps call:
-- a step that is refused in its middle would leave a record without an end. The probe finds nothing to
-- change, but for its last two commands.
--
-- KEYS: a record and a set that are nobody's.

local RECORD, SET = KEYS[1], KEYS[2]
for _, call in ipairs({
  {'TIME'},
  {'HMGET', RECORD, 'token'},
  {'HGET', RECORD, 'token'},
  {'HDEL', RECORD, 'token'},
  {'PTTL', RECORD},
  {'EXISTS', RECORD},
  {'PEXPIRE', RECORD, 1000},
  {'PEXPIREAT', RECORD, 1},
  {'SET', RECORD, '', 'XX', 'PX', 1000},
  {'ZSCORE', SET, ''},
  {'ZCARD', SET},
  {'ZRANGE', SET, -1, -1, 'WITHSCORES'},
  {'ZRANGEBYSCORE', SET, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1},
  {'ZREMRANGEBYSCORE', SET, '-inf', 0},
  {'ZADD', SET, 'XX', 1, ''},
  {'DEL', RECORD},
  {'HSET', RECORD, 'token', ''},
  {'DEL', RECORD},
}) do
  local answer = redis.pcall(unpack(call))
  if type(answer) == 'table' and answer.err then
    return {err = answer.err .. ' (' .. call[1] .. ')'}
  end
end
return {'done'}
