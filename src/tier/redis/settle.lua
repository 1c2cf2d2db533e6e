-- Completes or holds (rule 5).
--
-- ARGV: token, 'completed', 'not-kept' or 'held', retention in milliseconds, the outcome if completed.

local settler, becomes = ARGV[1], ARGV[2]

if token ~= settler or not is_open() then
  if token == settler and becomes ~= 'held' then
    return {'done'}
  end
  return lost(settler)
end
if becomes == 'completed' then
  redis.call('HSET', RECORD, 'state', becomes, 'since', now, 'outcome', ARGV[4])
else
  redis.call('HSET', RECORD, 'state', becomes, 'since', now)
end
redis.call('PEXPIREAT', RECORD, now + ARGV[3])
redis.call('HDEL', RECORD, 'waited')
if becomes ~= 'held' then
  redis.call('HDEL', RECORD, 'checkpoint')
end
tell()
return {'done'}
