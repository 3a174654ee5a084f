-- Claim a value for a fence, and write it if asked to.
-- KEYS: the value, the mark of who claimed it last
-- ARGV: fence, owner, life of the mark in ms (0 is for ever),
--       "claim" | "set" | "delete", the value, its ttl in ms (0 is for ever)
-- Returns "" where it was done, else the higher (or another owner's equal) fence.
local seen = redis.call('GET', KEYS[2])
if seen then
  local fence, owner = string.match(seen, '^(%d+) (.*)$')
  local stale = tonumber(ARGV[1]) < tonumber(fence)
  if stale or (ARGV[1] == fence and ARGV[2] ~= owner) then
    return fence
  end
end
redis.call('SET', KEYS[2], ARGV[1] .. ' ' .. ARGV[2])
if ARGV[3] ~= '0' then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
if ARGV[4] == 'delete' then
  redis.call('DEL', KEYS[1])
elseif ARGV[4] == 'set' then
  redis.call('SET', KEYS[1], ARGV[5])
  if ARGV[6] ~= '0' then
    redis.call('PEXPIRE', KEYS[1], ARGV[6])
  end
end
return ''
