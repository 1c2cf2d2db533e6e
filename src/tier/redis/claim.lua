-- Claims, or takes over (rules 2, 3, 4).
--
-- KEYS: also, the note that the claim of this token was given up.
-- ARGV: token, fingerprint, max_run and retention in milliseconds, the token that was seen or ''.

local GIVEN_UP = KEYS[4]
local claimer, seen = ARGV[1], ARGV[5]

if token == claimer and kept == 'in-flight' and seen == '' then
  return {'won', due, redis.call('HGET', RECORD, 'checkpoint')}
end
if token and seen == '' then
  return found()
end
if (alive_until(claimer) or 0) <= now then
  return {'owner-lapsed'}
end
if token then
  local is = state()
  if token ~= seen or (is ~= 'lapsed' and is ~= 'held') then
    if token == claimer and kept == 'in-flight' then
      return {'won', due, redis.call('HGET', RECORD, 'checkpoint')}
    end
    return found()
  end
end
if redis.call('EXISTS', GIVEN_UP) == 1 then
  return {'given-up'}
end
due = now + ARGV[3]
redis.call('HSET', RECORD, 'format', '1', 'token', claimer, 'fingerprint', ARGV[2],
  'state', 'in-flight', 'since', now, 'due', due)
redis.call('PEXPIREAT', RECORD, due + ARGV[4])
return {'won', due, redis.call('HGET', RECORD, 'checkpoint')}
