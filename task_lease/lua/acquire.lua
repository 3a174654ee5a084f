-- Acquire: a lease that is free, expired or already mine becomes mine.
--
-- KEYS  1..4 as in shared.lua
-- ARGV  1 owner            unique per acquisition
--       2 ttl              ms
--       3 record           JSON, who the holder is
--       4 random           0..999, drawn by the client
--       5 life             ms that the floor outlives its fence, 0 = keep no floor
--       6 channel          where to wake me; "" = do not wait in the queue
--       7 patience         ms after the holder's end at which I count as dead
--       8 arrival          us, my place from an earlier answer; "" = the end
-- Returns {1, fence}
--      or {0, remaining ms, ttl ms, fence, owner, record, arrival} of the holder.
-- Repeating it gives the same answer: "already mine" is a success.

local me, ttl, record, random, life = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local function wait_in_queue(us, remaining)
  if ARGV[6] == '' then
    return ''
  end
  local arrival = ARGV[8]
  if arrival == '' then
    arrival = redis.call('ZSCORE', KEYS[3], me)
    arrival = arrival and digits(tonumber(arrival)) or digits(us)
  end
  local grace = remaining + tonumber(ARGV[7])
  redis.call('ZADD', KEYS[3], arrival, me)
  redis.call('HSET', KEYS[4], me, digits(math.ceil(us / 1000) + grace)
    .. ' ' .. ttl .. ' ' .. ARGV[6] .. ' ' .. record)
  for key = 3, 4 do
    if redis.call('PTTL', KEYS[key]) < grace then
      redis.call('PEXPIRE', KEYS[key], digits(grace))
    end
  end
  return arrival
end

local stored = redis.call('MGET', KEYS[1], KEYS[2])
local lease, floor = stored[1], stored[2]
local us = server_us()

if lease then
  local owner, fence, their_ttl, their_record =
    string.match(lease, '^(%S+) (%d+) (%d+) (.*)$')
  if owner == me then
    redis.call('SET', KEYS[1], me .. ' ' .. fence .. ' ' .. ttl .. ' ' .. record,
      'PX', ttl)
    forget_waiter(me)
    return {1, fence}
  end
  if not owner then
    return redis.error_reply('TASKLEASE the lease key holds something else')
  end
  local remaining = redis.call('PTTL', KEYS[1])
  -- Longer than it was ever set for, or endless: the clock stepped back, or somebody
  -- took the expiry away. Nobody shall be locked out for that.
  if remaining < 0 or remaining > tonumber(their_ttl) then
    redis.call('PEXPIRE', KEYS[1], their_ttl)
    remaining = tonumber(their_ttl)
  end
  local arrival = wait_in_queue(us, remaining)
  return {0, remaining, tonumber(their_ttl), fence, owner, their_record, arrival}
end

local first = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
if first and first ~= me then
  first = first_live_waiter(us / 1000)
end
if first and first ~= me then
  local owner, fence, short, their_record =
    reserve_for_waiter(us, floor, random, life)
  local arrival = wait_in_queue(us, tonumber(short))
  return {0, tonumber(short), tonumber(short), fence, owner, their_record, arrival}
end

local fence = write_lease(me, next_fence(us, floor, random), ttl, record, life)
if first then
  forget_waiter(me)
end
return {1, fence}
