-- Release: end a lease that is mine and hand it to the first live waiter.
--
-- Also gives up waiting: an owner that only waits holds nothing, and leaves the queue.
--
-- KEYS  1..4 as in shared.lua
-- ARGV  1 owner
--       2 random   0..999, drawn by the client
--       3 life     ms that the floor outlives its fence, 0 = keep no floor
-- Returns {1, error} if it was mine, {0, ""} if not. A hand-over that fails is told
-- as text, for the lease has ended all the same; the waiter then asks by itself.
-- The delete comes first: a script whose first write needs no memory is not refused
-- by a full server, and what comes later may fail without keeping the lease.

local lease = redis.call('GET', KEYS[1])
if not lease or string.sub(lease, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then
  forget_waiter(ARGV[1])
  return {0, ''}
end
redis.call('DEL', KEYS[1])
if redis.call('EXISTS', KEYS[3]) == 0 then
  return {1, ''}
end
local ok, problem = pcall(function()
  reserve_for_waiter(server_us(), redis.call('GET', KEYS[2]), ARGV[2], ARGV[3])
end)
if ok then
  return {1, ''}
end
if type(problem) == 'table' then
  problem = problem['err']
end
return {1, tostring(problem)}
