-- Gives the identity up (rule 5).
--
-- KEYS: also, the note that the claim of this token was given up.
-- ARGV: token, how long that note stays in milliseconds: 0 if the claim was answered. An answer that
-- never came may be one of a claim that is still under way on a connection that was replaced since: it
-- finds the note, and claims nothing (T4).

local GIVEN_UP = KEYS[4]
local releaser, noted = ARGV[1], ARGV[2]

if token ~= releaser or not is_open() then
  if noted ~= '0' and token ~= releaser then
    redis.call('SET', GIVEN_UP, '', 'PX', noted)
  end
  return lost(releaser)
end
redis.call('DEL', RECORD)
tell()
return {'done'}
