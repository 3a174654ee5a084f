-- Renew: give a lease that is still mine its full time again. Never creates one.
--
-- KEYS  1 lease
-- ARGV  1 owner
--       2 ttl    ms
-- Returns 1 if still mine, 0 if not.

local lease = redis.call('GET', KEYS[1])
if not lease or string.sub(lease, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
