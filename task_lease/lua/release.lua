-- Release: end a lease that is mine and hand it to whoever came first.
--
-- Also gives up waiting: an owner that only waits holds nothing, and leaves the queue.
--
-- KEYS  1..6 as in shared.lua
--       7 done     string, the last attempt of this task that has an outcome; only
--                  with argument 4
-- ARGV  1 owner
--       2 random   0..999, drawn by the client
--       3 life     ms that the floor outlives its fence, 0 = keep no floor
--       4 attempt  the attempt whose outcome is stored, so that no copy of it runs
--                  again; left out to say nothing about it
--       5 done for ms that this is remembered
-- Returns {1, error, entry} if it was mine, {0, "", ""} if not. A hand-over that fails
-- is told as text, for the lease has ended all the same; a waiter then asks by itself,
-- and a parked job is found by the next sweep. The entry is the job handed over.
-- The delete comes first: a script whose first write needs no memory is not refused
-- by a full server, and what comes later may fail without keeping the lease.

local lease = redis.call('GET', KEYS[1])
if not lease or string.sub(lease, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then
  forget_waiter(ARGV[1])
  return {0, '', ''}
end
redis.call('DEL', KEYS[1])
if ARGV[4] then
  redis.call('SET', KEYS[7], ARGV[4], 'PX', ARGV[5])
end
if redis.call('EXISTS', KEYS[3], KEYS[5]) == 0 then
  return {1, '', ''}
end
return passed_on(ARGV[2], ARGV[3])
