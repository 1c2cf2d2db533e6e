-- Gives the identity up as if its owner had died (rule 5): it is nobody's.
--
-- KEYS: also, the note that the claim of this token was given up.
-- ARGV: as of a release.

local GIVEN_UP = KEYS[4]
local lapser, noted = ARGV[1], ARGV[2]

if token ~= lapser or not is_open() then
  if noted ~= '0' and token ~= lapser then
    redis.call('SET', GIVEN_UP, '', 'PX', noted)
  end
  return lost(lapser)
end
-- Owner 0 never beats.
redis.call('HSET', RECORD, 'token', string.rep('0', 16) .. string.sub(token, 17),
  'state', 'in-flight')
redis.call('HDEL', RECORD, 'waited')
tell()
return {'done'}
