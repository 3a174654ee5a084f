-- Sweep: hand a lease over that ended without a release, and beside which jobs wait.
--
-- KEYS  1..6 as in shared.lua
--       7 index    set of the leases beside which something is parked
-- ARGV  1 random   0..999, drawn by the client
--       2 life     ms that the floor outlives its fence, 0 = keep no floor
-- Returns {0} if nothing waits, {1, error, entry} of a hand-over as in release.lua,
--      or {2, owner, record} of the holder.

if redis.call('EXISTS', KEYS[5]) == 0 then
  redis.call('SREM', KEYS[7], KEYS[1])
  return {0}
end
local stored = redis.call('MGET', KEYS[1], KEYS[6])
if stored[1] then
  local owner, record = string.match(stored[1], '^(%S+) %d+ %d+ (.*)$')
  return {2, owner or '', record or ''}
end
if stored[2] then
  return {1, '', ''}
end
return passed_on(ARGV[1], ARGV[2])
