-- Tells what is there.

if not token then
  return {'absent'}
end
return found()
