-- Settles the record if it is held or lapsed.
--
-- ARGV: retention in milliseconds; the outcome, or none at all to give the identity up.

if not token then
  return {'absent'}
end
local is = state()
if is ~= 'held' and is ~= 'lapsed' then
  return {is}
end
if ARGV[2] then
  -- By no owner: the former one's token is stale.
  redis.call('HSET', RECORD, 'state', 'completed', 'since', now, 'outcome', ARGV[2],
    'token', '0000000000000000' .. string.sub(token, 17))
  redis.call('PEXPIREAT', RECORD, now + ARGV[1])
  redis.call('HDEL', RECORD, 'waited', 'checkpoint')
else
  redis.call('DEL', RECORD)
end
recall()
tell()
return {'done'}
