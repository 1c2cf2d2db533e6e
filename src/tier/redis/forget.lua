-- Forgets the record, unless it is in flight.
--
-- ARGV: '1' if it is forgotten even then.

if not token then
  return {'absent'}
end
if ARGV[1] ~= '1' and state() == 'in-flight' then
  return {'busy'}
end
redis.call('DEL', RECORD)
recall()
tell()
return {'gone'}
