-- Put behind shared.lua: jobs parked beside their lease, and who gets it next.
--
-- A parked job is an entry of KEYS[5], the same text whenever the same attempt is
-- parked: JSON with
--   name, id              the lease's name, the job's id
--   attempt               when the job was put into its queue, as text that sorts
--   job, queue            its hash and the list it came from
--   queues, deferred      the set of all queues, the registry of jobs that wait
--   record                JSON, who the holder is once the job runs
-- The lease store and RQ share a server then, and no cluster, so these need not be in
-- KEYS. Whoever releases a lease may hand over, also if RQ means nothing to it.

local HANDED_MS = 5000
-- Entries that one call looks at, at the most.
local MOST_TRIED = 50
local DONE = {finished = true, failed = true, scheduled = true}
local CALLED_OFF = {canceled = true, stopped = true}

-- What pcall caught: a table or a text, depending on the server's version.
local function text_of(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

-- Reserves the lease for a parked job, whose worker draws its own owner later.
local function owner_for(entry)
  return 'parked:' .. redis.sha1hex(entry)
end

-- Returns what the hash of a job says if the attempt still waits to run: its job is
-- there, was not called off, was not put into a queue anew, and has no outcome of this
-- attempt. Otherwise it returns false.
local function look_at_job(park)
  local found = redis.call('HMGET', park.job, 'status', 'enqueued_at')
  local status, enqueued_at = found[1], found[2]
  if not status or CALLED_OFF[status] then
    return false
  end
  if enqueued_at and (enqueued_at > park.attempt
      or enqueued_at == park.attempt and DONE[status]) then
    return false
  end
  return {status = status, enqueued_at = enqueued_at}
end

local function forget_parked(entry)
  if redis.call('ZREM', KEYS[5], entry) == 1 then
    local park = cjson.decode(entry)
    redis.call('ZREM', park.deferred, park.id)
  end
end

-- Puts the job to the front of its queue, where it has waited before. Returns nothing,
-- or why the server refused; then nothing has changed.
local function push(park, found)
  local reply = redis.pcall('LPUSH', park.queue, park.id)
  if type(reply) == 'table' and reply.err then
    return reply.err
  end
  redis.pcall('SADD', park.queues, park.queue)
  redis.pcall('HSET', park.job, 'status', 'queued')
  -- An older run of the same job that has ended left its own instant, and an expiry.
  if DONE[found.status] then
    redis.pcall('PERSIST', park.job)
    redis.pcall('HSET', park.job, 'enqueued_at', park.attempt)
  end
  redis.pcall('ZREM', park.deferred, park.id)
end

-- Hands one parked job over: the first that came before an instant and can be pushed.
-- What no longer wants to run is dropped; what the server refuses keeps its place and
-- keeps nobody back. Returns the entry and its record, or nothing and the last refusal.
-- An entry that asks itself is returned as it is.
local function hand_over(before, mine)
  local index, problem = 0, nil
  for _ = 1, MOST_TRIED do
    local head = redis.call('ZRANGE', KEYS[5], index, index, 'WITHSCORES')
    local entry = head[1]
    if not entry or (before and before <= tonumber(head[2])) then
      break
    end
    if entry == mine then
      return entry
    end
    local park = cjson.decode(entry)
    local readable, found = pcall(look_at_job, park)
    if readable and not found then
      redis.call('ZREM', KEYS[5], entry)
      -- Unless it waits there for something else by now.
      if redis.pcall('HGET', park.job, 'status') ~= 'deferred' then
        redis.pcall('ZREM', park.deferred, park.id)
      end
    else
      problem = readable and push(park, found) or (not readable and text_of(found))
      if not problem then
        redis.call('ZREM', KEYS[5], entry)
        redis.call('SET', KEYS[6], entry, 'PX', HANDED_MS)
        return entry, park.record
      end
      index = index + 1
    end
  end
  return nil, problem
end

-- Holds the free lease for whoever came first, for a short time and with a fence of
-- its own: a live waiter, who is told, or a parked job, which is handed over. Nobody
-- else can come in between. Returns nothing if nobody is first or the one who asks.
local function pass_on(us, floor, random, life, asks)
  local waiter = first_live_waiter(us / 1000)
  local entry, record, problem
  if asks.of_parked then
    entry, record = hand_over(waiter and waiter.arrival, asks.entry)
    if not entry then
      problem = record
    end
  end
  if entry and entry ~= asks.entry then
    local owner = owner_for(entry)
    local short = digits(RESERVED_MS)
    local fence = write_lease(owner, next_fence(us, floor, random), short, record, life)
    return {owner = owner, fence = fence, ttl = short, record = record, entry = entry}
  end
  if entry or not waiter or waiter.owner == asks.owner then
    return nil, problem
  end
  local short = digits(math.min(tonumber(waiter.ttl), RESERVED_MS))
  local fence =
    write_lease(waiter.owner, next_fence(us, floor, random), short, waiter.record, life)
  forget_waiter(waiter.owner)
  redis.call('PUBLISH', waiter.channel, waiter.owner)
  return {owner = waiter.owner, fence = fence, ttl = short, record = waiter.record}
end

-- Parks a job. Returns its arrival; "" if it is not wanted any more, so that nothing
-- is to be done; nothing if it has conflicted as often as it may.
-- The hash of a job whose other run holds the lease belongs to that run.
local function park_beside(us, holder_record, entry, details)
  local park, how = cjson.decode(entry), cjson.decode(details)
  local found = redis.call('HMGET', park.job, 'status', 'lease_place')
  local status, place = found[1], found[2]
  if not status or CALLED_OFF[status] then
    return ''
  end
  local arrival, conflicts, attempt =
    string.match(place or '', '^(%d+) (%d+) (.*)$')
  if attempt ~= park.attempt then
    arrival, conflicts = digits(us), '0'
  end
  if how.counts then
    if how.limit and tonumber(conflicts) >= how.limit then
      return nil
    end
    conflicts = digits(tonumber(conflicts) + 1)
  end
  redis.call('ZADD', KEYS[5], arrival, entry)
  redis.call('SADD', KEYS[7], KEYS[1])
  redis.call('HSET', park.job, 'lease_execution', how.execution,
    'lease_place', arrival .. ' ' .. conflicts .. ' ' .. park.attempt)
  local known, holder = pcall(cjson.decode, holder_record)
  if not (known and type(holder) == 'table' and holder.id == park.id) then
    redis.call('HSET', park.job, 'status', 'deferred')
    redis.call('ZADD', park.deferred, how.score, park.id)
  end
  redis.call('ZREM', how.started, park.id .. ':' .. how.execution)
  redis.call('LREM', how.intermediate, 1, park.id)
  return arrival
end

-- Whether this very run of a job has been parked by a call whose answer was lost.
local function is_parked_already(entry, details)
  local job = cjson.decode(entry).job
  return redis.call('HGET', job, 'lease_execution') == cjson.decode(details).execution
end

-- The rest of an operation that has freed a lease. The lease has ended whatever goes
-- wrong here, so an error is an answer.
local function passed_on(random, life)
  local first, problem
  local ok, failure = pcall(function()
    first, problem = pass_on(server_us(), redis.call('GET', KEYS[2]), random, life,
      {owner = '', entry = '', of_parked = true})
  end)
  if not ok then
    problem = text_of(failure)
  end
  return {1, problem or '', first and first.entry or ''}
end
