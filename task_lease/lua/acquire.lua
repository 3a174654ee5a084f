-- Acquire: a lease that is free, expired or already mine becomes mine.
--
-- KEYS  1..6 as in shared.lua
--       7 index            set of the leases beside which something is parked;
--                          only where this may park
--      or done             string, the last attempt of this task that has an outcome;
--                          only with argument 11
-- ARGV  1 owner            unique per acquisition
--       2 ttl              ms
--       3 record           JSON, who the holder is
--       4 random           0..999, drawn by the client
--       5 life             ms that the floor outlives its fence, 0 = keep no floor
--       6 channel          where to wake me; "" = do not wait in the queue
--       7 patience         ms after the holder's end at which I count as dead
--       8 arrival          us, my place from an earlier answer; "" = the end
--       9 entry            what I am when parked (parking.lua); "" = never parked
--      10 details          JSON, park me if there is a conflict; "" = do not park:
--                          execution, started, intermediate and score are RQ's (which
--                          run this is, its registry, the list of popped jobs, the
--                          score among the deferred); counts and limit say whether
--                          this counts as a conflict, and how many there may be
--      11 attempt          which attempt of the task this is, if it may be a copy of
--                          one that is done; left out if it is none
-- Returns {1, fence}
--      or {0, remaining ms, ttl ms, fence, owner, record, arrival} of the holder
--      or {2, arrival} if it was parked; arrival "" = its job is gone or called off.
--      or {3} if this attempt, or a later one, is done.
-- Repeating it gives the same answer: "already mine" and "already parked" are kept.

local me, ttl, record, random, life = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local entry, details = ARGV[9], ARGV[10]

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

local function refuse(us, remaining, holder)
  if details ~= '' then
    local arrival = park_beside(us, holder.record, entry, details)
    if arrival then
      return {2, arrival}
    end
  end
  local arrival = wait_in_queue(us, remaining)
  return {0, remaining, tonumber(holder.ttl), holder.fence, holder.owner,
    holder.record, arrival}
end

-- Gives the lease to me, who may have stood in line.
local function grant(fence, handed, in_line)
  if in_line then
    forget_waiter(me)
    if entry ~= '' then
      forget_parked(entry)
    end
  end
  if handed and handed == entry then
    redis.call('DEL', KEYS[6])
  end
  return {1, fence}
end

if ARGV[11] then
  local done = redis.call('GET', KEYS[7])
  if done and tonumber(done) >= tonumber(ARGV[11]) then
    return {3}
  end
end

local stored = redis.call('MGET', KEYS[1], KEYS[2], KEYS[6])
local lease, floor, handed = stored[1], stored[2], stored[3]
local us = server_us()

local holder = {}
if lease then
  holder.owner, holder.fence, holder.ttl, holder.record =
    string.match(lease, '^(%S+) (%d+) (%d+) (.*)$')
  if not holder.owner then
    return redis.error_reply('TASKLEASE the lease key holds something else')
  end
end
if details ~= '' and holder.owner ~= me and is_parked_already(entry, details) then
  return {2, ''}
end

if lease then
  local reserved = entry ~= '' and string.sub(holder.owner, 1, 7) == 'parked:'
    and holder.owner == owner_for(entry)
  if holder.owner == me or reserved then
    redis.call('SET', KEYS[1],
      me .. ' ' .. holder.fence .. ' ' .. ttl .. ' ' .. record, 'PX', ttl)
    return grant(holder.fence, handed, true)
  end
  local remaining = redis.call('PTTL', KEYS[1])
  -- Longer than it was ever set for, or endless: the clock stepped back, or somebody
  -- took the expiry away. Nobody shall be locked out for that.
  if remaining < 0 or remaining > tonumber(holder.ttl) then
    redis.call('PEXPIRE', KEYS[1], holder.ttl)
    remaining = tonumber(holder.ttl)
  end
  return refuse(us, remaining, holder)
end

local in_line = redis.call('EXISTS', KEYS[3], KEYS[5]) > 0
if in_line and not (handed and handed == entry) then
  -- A job that was handed over and does not come keeps nobody else back.
  local first = pass_on(us, floor, random, life,
    {owner = me, entry = entry, of_parked = not handed})
  if first then
    return refuse(us, tonumber(first.ttl), first)
  end
end
return grant(write_lease(me, next_fence(us, floor, random), ttl, record, life), handed,
  in_line)
