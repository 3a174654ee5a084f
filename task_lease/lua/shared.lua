-- Put in front of acquire.lua and release.lua: what both need.
--
-- Keys, all in one slot:
--   KEYS[1] lease    string "<owner> <fence> <ttl ms> <record>", expires with the lease
--   KEYS[2] floor    string, the highest fence issued; expires at fence + life
--   KEYS[3] queue    sorted set of waiting owners by time of arrival (us)
--   KEYS[4] waiters  hash owner -> "<alive until ms> <ttl ms> <channel> <record>"

local RESERVED_MS = 2000

local function server_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- %.0f, since tostring and .. would round a number of this size.
local function digits(number)
  return string.format('%.0f', number)
end

local function next_fence(us, floor, random)
  if floor then
    return math.max(us, tonumber(floor) + 1 + tonumber(random))
  end
  return us
end

-- The floor outlives the server's clock passing it, or a step back could repeat it.
local function write_lease(owner, fence, ttl, record, life)
  local text = digits(fence)
  redis.call('SET', KEYS[1], owner .. ' ' .. text .. ' ' .. ttl .. ' ' .. record,
    'PX', ttl)
  if tonumber(life) > 0 then
    redis.call('SET', KEYS[2], text,
      'PXAT', digits(math.ceil(fence / 1000) + tonumber(life)))
  end
  return text
end

local function forget_waiter(owner)
  redis.call('ZREM', KEYS[3], owner)
  redis.call('HDEL', KEYS[4], owner)
end

local function first_live_waiter(now_ms)
  while true do
    local owner = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not owner then
      return nil
    end
    local entry = redis.call('HGET', KEYS[4], owner)
    if entry then
      local alive, ttl, channel, record =
        string.match(entry, '^(%d+) (%d+) (%S+) (.*)$')
      if tonumber(alive) >= now_ms then
        return owner, ttl, channel, record
      end
    end
    forget_waiter(owner)
  end
end

-- Holds the free lease for the first live waiter, for a short time and with a fence
-- of its own, and tells that waiter. Nobody else can come in between.
local function reserve_for_waiter(us, floor, random, life)
  local owner, ttl, channel, record = first_live_waiter(us / 1000)
  if not owner then
    return nil
  end
  local short = digits(math.min(tonumber(ttl), RESERVED_MS))
  local fence = write_lease(owner, next_fence(us, floor, random), short, record, life)
  forget_waiter(owner)
  redis.call('PUBLISH', channel, owner)
  return owner, fence, short, record
end
