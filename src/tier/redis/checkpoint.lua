-- Leaves bytes for the next owner (rule 5).
--
-- ARGV: token, the bytes.

if token ~= ARGV[1] or not is_open() then
  return lost(ARGV[1])
end
redis.call('HSET', RECORD, 'checkpoint', ARGV[2])
return {'done'}
