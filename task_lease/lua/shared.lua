-- Put in front of the operations that give a lease away: what all of them need.
--
-- Keys, all in one slot:
--   KEYS[1] lease    string "<owner> <fence> <ttl ms> <record>", expires with the lease
--   KEYS[2] floor    string, the highest fence issued; expires at fence + life
--   KEYS[3] queue    sorted set of waiting owners by time of arrival (us)
--   KEYS[4] waiters  hash owner -> "<alive until ms> <ttl ms> <channel> <record>"
--   KEYS[5] parked   sorted set of parked jobs (parking.lua) by time of arrival (us)
--   KEYS[6] handed   string, the parked job that is on its way to a worker; expires

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
    local head = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
    local owner = head[1]
    if not owner then
      return nil
    end
    local entry = redis.call('HGET', KEYS[4], owner)
    if entry then
      local alive, ttl, channel, record =
        string.match(entry, '^(%d+) (%d+) (%S+) (.*)$')
      if tonumber(alive) >= now_ms then
        return {owner = owner, arrival = tonumber(head[2]), ttl = ttl,
          channel = channel, record = record}
      end
    end
    forget_waiter(owner)
  end
end
