"""Atomic updates of the registry, as Lua scripts: Redis runs each as a whole, without interleaving.

A script names its keys and arguments at its head. Each gets all keys of a run, in the order of `KEYS`.
"""

from __future__ import annotations

KEYS = ("facts", "versions", "aliases", "paused", "events", "refused", "began_at")
"""Metadata by version (hash), announcements (stream), version by alias (hash), whether paused, events (stream), refused
versions (set), and the start time of the run that all of this belongs to (unix time)."""
FIELD = b"json"
"""The only field of a stream entry."""
_MAX_ANNOUNCEMENTS, _MAX_EVENTS = 1000, 10_000

_PRELUDE = f"""
local facts, announced, aliases, paused, events, refused, began_at = unpack(KEYS)

-- What an earlier run of the same name left is not this run's. A time may be empty: not known.
local function begin(time)
  local before = redis.call('GET', began_at)
  if time == '' or before and tonumber(time) <= tonumber(before) then return end
  if before then
    redis.call('DEL', facts, aliases, paused, refused)
    -- Not deleted: their ids go on rising, and who reads them reads on.
    redis.call('XTRIM', announced, 'MAXLEN', 0)
    redis.call('XTRIM', events, 'MAXLEN', 0)
  end
  redis.call('SET', began_at, time)
end

local function announce(text)
  redis.call('XADD', announced, 'MAXLEN', '~', {_MAX_ANNOUNCEMENTS}, '*', '{FIELD.decode()}', text)
end

-- As PolicyVersion.has_same_weights means it; a digest may be empty.
local function is_of(text, digest)
  local known = cjson.decode(text).manifest_digest
  return known == cjson.null or digest == '' or known == digest
end

-- `text` with what it lacks and `other`, of the same weights, says; nothing where it lacks nothing.
local function fill(text, other)
  local policy, has_news = cjson.decode(text), false
  local said = cjson.decode(other)
  if not is_of(text, said.manifest_digest == cjson.null and '' or said.manifest_digest) then return end
  for name, value in pairs(said) do
    if policy[name] == cjson.null and value ~= cjson.null then policy[name], has_news = value, true end
  end
  return has_news and cjson.encode(policy)
end

-- A version and a reason may be empty.
local function tell(kind, version, why)
  local event = {{kind = kind, version = cjson.null, round = cjson.null, why = cjson.null}}
  if why ~= '' then event.why = why end
  if version ~= '' then
    event.version = tonumber(version)
    local text = redis.call('HGET', facts, version)
    if text then event.round = cjson.decode(text).round end
  end
  redis.call('XADD', events, 'MAXLEN', '~', {_MAX_EVENTS}, '*', '{FIELD.decode()}', cjson.encode(event))
end
"""

ANNOUNCE = (
    _PRELUDE
    + """
local began, version, text, digest, is_base = unpack(ARGV)
begin(began)
local known = redis.call('HGET', facts, version)
local knew_any = redis.call('HEXISTS', aliases, 'newest')
local same = known and is_of(known, digest)
if same then text = fill(text, known) or text end
redis.call('HSET', facts, version, text)
redis.call('HSET', aliases, 'newest', version)
if is_base == '1' then redis.call('HSET', aliases, 'base', version) end
announce(text)
if not same then
  -- Other weights than those that were refused under this number.
  redis.call('SREM', refused, version)
  tell('published', version, '')
end
return knew_any
"""
)

UPDATE = (
    _PRELUDE
    + """
local version, news = unpack(ARGV)
local text = redis.call('HGET', facts, version)
if not text then return 0 end
local policy = cjson.decode(text)
for name, value in pairs(cjson.decode(news)) do
  -- What was refused as it came from elsewhere may be whole there.
  if name == 'checkpoint' and policy.checkpoint ~= value then redis.call('SREM', refused, version) end
  policy[name] = value
end
text = cjson.encode(policy)
redis.call('HSET', facts, version, text)
if redis.call('HGET', aliases, 'newest') ~= version then return 0 end
announce(text)
return 1
"""
)

MOVE = (
    _PRELUDE
    + """
local alias, to, expected, why = unpack(ARGV)
if redis.call('HEXISTS', facts, to) == 0 then return -1 end
local now = redis.call('HGET', aliases, alias) or ''
if now ~= expected then return 0 end
redis.call('HSET', aliases, alias, to)
if now ~= to then
  tell(alias == 'policy' and 'serving' or 'moved', to, why)
  if alias == 'policy' and now ~= '' then tell('retired', now, why) end
end
return 1
"""
)

PIN = (
    _PRELUDE
    + """
local version, why = unpack(ARGV)
local now = redis.call('HGET', aliases, 'pinned') or ''
if version ~= '' and redis.call('HEXISTS', facts, version) == 0 then return -1 end
if version == now then return 0 end
if version == '' then
  redis.call('HDEL', aliases, 'pinned')
  tell('unpinned', now, why)
else
  redis.call('HSET', aliases, 'pinned', version)
  tell('pinned', version, why)
end
return 1
"""
)

PAUSE = (
    _PRELUDE
    + """
local wanted, why = unpack(ARGV)
if redis.call('EXISTS', paused) == tonumber(wanted) then return 0 end
if wanted == '1' then
  redis.call('SET', paused, '1')
  tell('paused', '', why)
else
  redis.call('DEL', paused)
  tell('resumed', '', why)
end
return 1
"""
)

REFUSE = (
    _PRELUDE
    + """
local version, why, digest = unpack(ARGV)
local known = redis.call('HGET', facts, version)
if known and not is_of(known, digest) then return 0 end
if redis.call('SADD', refused, version) == 0 then return 0 end
tell('refused', version, why)
return 1
"""
)

RESTORE = (
    _PRELUDE
    + """
local began, newest, base, best = unpack(ARGV)
begin(began)
local num_added = 0
for i = 5, #ARGV, 2 do
  local version, text = ARGV[i], ARGV[i + 1]
  local known = redis.call('HGET', facts, version)
  if not known then
    redis.call('HSET', facts, version, text)
    num_added = num_added + 1
  else
    local filled = fill(known, text)
    if filled then
      redis.call('HSET', facts, version, filled)
      if redis.call('HGET', aliases, 'newest') == version then announce(filled) end
    end
  end
end
if base ~= '' then redis.call('HSETNX', aliases, 'base', base) end
if best ~= '' and redis.call('HEXISTS', facts, best) == 1 then
  local before = redis.call('HGET', aliases, 'best')
  redis.call('HSET', aliases, 'best', best)
  if before and before ~= best then tell('moved', best, '') end
end
if newest ~= '' and redis.call('HSETNX', aliases, 'newest', newest) == 1 then
  announce(redis.call('HGET', facts, newest))
end
if num_added > 0 then tell('rebuilt', newest, num_added .. ' versions from the run directory') end
return num_added
"""
)

ALL = (ANNOUNCE, UPDATE, MOVE, PIN, PAUSE, REFUSE, RESTORE)
