-- Notes that somebody waits for the record, so that whoever settles it says so. The caller listens
-- already: what is settled after this step is heard, what was settled before is seen here (R14).

if not is_open() then
  return {'settled'}
end
if not waited then
  redis.call('HSET', RECORD, 'waited', '1')
end
return {'open'}
