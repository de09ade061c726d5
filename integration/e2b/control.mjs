// The life of sandboxes, through the SDK as it is published.
import { test } from 'node:test'
import assert from 'node:assert/strict'
import { AuthenticationError, E2B, Sandbox, SandboxError, SandboxNotFoundError } from 'e2b'

const mark = `run-${process.pid}`
const url = process.env.E2B_API_URL

async function until(what, cond, ms = 20_000) {
  for (const end = Date.now() + ms; ;) {
    const v = await cond()
    if (v) return v
    if (Date.now() > end) assert.fail(`waited in vain: ${what}`)
    await new Promise((r) => setTimeout(r, 50))
  }
}

async function all(paginator) {
  const out = []
  while (paginator.hasNext) out.push(...(await paginator.nextItems()))
  return out
}

// using makes a sandbox for the time of a test.
async function using(opts, f) {
  const box = await Sandbox.create({ timeoutMs: 120_000, ...opts })
  try { await f(box) } finally { await box.kill() }
}

test('what is known of a sandbox', async () => {
  await using({ metadata: { mark, kind: 'known' }, envs: { A: 'b' } }, async (box) => {
    const info = await box.getInfo()
    assert.equal(info.sandboxId, box.sandboxId)
    assert.equal(info.templateId, 'base')
    assert.equal(info.name, 'base')
    assert.deepEqual(info.metadata, { mark, kind: 'known' })
    assert.equal(info.state, 'running')
    assert.ok(Math.abs(info.endAt - info.startedAt - 120_000) < 5000)
    assert.ok(Math.abs(info.startedAt - Date.now()) < 60_000)
    assert.ok(info.cpuCount >= 1 && info.memoryMB >= 128)
    assert.equal(info.envdVersion, '0.6.4')
    assert.deepEqual(info.lifecycle, { onTimeout: 'kill', autoResume: false })
    assert.equal(info.allowInternetAccess, undefined)
    assert.deepEqual(info.volumeMounts, [])
    assert.equal(await box.isRunning(), true)
    assert.match(box.getHost(8000), new RegExp(`^8000-${box.sandboxId}\\.`))
    assert.equal((await box.commands.run('echo $A')).stdout, 'b\n')
  })
})

test('a sandbox that is not there', async () => {
  for (const id of ['sbaaaaaaaaaaaa', 'i-never-was', '..']) {
    await assert.rejects(Sandbox.getInfo(id), SandboxError)
    await assert.rejects(Sandbox.connect(id), SandboxError)
    await assert.rejects(Sandbox.setTimeout(id, 1000), SandboxError)
    if (id !== '..') assert.equal(await Sandbox.kill(id), false)
  }
  await assert.rejects(Sandbox.getInfo('sbaaaaaaaaaaaa'), SandboxNotFoundError)
  const box = await Sandbox.create()
  assert.equal(await box.kill(), true)
  assert.equal(await box.kill(), false)
  assert.equal(await box.isRunning(), false)
  await assert.rejects(box.getInfo(), SandboxNotFoundError)
  await assert.rejects(Sandbox.create('no-such-template'), (e) => /404/.test(e.message))
})

test('a key is needed', async () => {
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(64) }), AuthenticationError)
  await assert.rejects(all(Sandbox.list({ apiKey: 'e2b_' + 'f'.repeat(64) })), AuthenticationError)
  assert.equal((await fetch(`${url}/v2/sandboxes`)).status, 401)
  await using({}, async (box) => { // and a token, for what is inside
    const head = { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '49983' }
    const ask = (more) => fetch(`${url}/process.Process/List`, { method: 'POST', body: '{}', headers: { 'content-type': 'application/json', ...head, ...more } })
    assert.equal((await ask({})).status, 401)
    assert.equal((await ask({ 'X-Access-Token': 'guess' })).status, 401)
    assert.equal((await ask({ 'X-Access-Token': box.envdAccessToken })).status, 200)
  })
})

test('lists: pages, metadata, states, templates', async () => {
  const made = []
  try {
    for (let i = 0; i < 5; i++) made.push(await Sandbox.create({ timeoutMs: 120_000, metadata: { mark, i: String(i), odd: 'a b&c=d/ä%' } }))
    const ids = made.map((b) => b.sandboxId).reverse()
    const query = { metadata: { mark, odd: 'a b&c=d/ä%' } }
    assert.deepEqual((await all(Sandbox.list({ query }))).map((b) => b.sandboxId), ids)
    const pages = Sandbox.list({ query, limit: 2 })
    const sizes = []
    const seen = []
    while (pages.hasNext) {
      const page = await pages.nextItems()
      sizes.push(page.length)
      seen.push(...page.map((b) => b.sandboxId))
    }
    assert.deepEqual(sizes, [2, 2, 1])
    assert.deepEqual(seen, ids)
    assert.deepEqual((await all(Sandbox.list({ query, order: 'asc', limit: 2 }))).map((b) => b.sandboxId), [...ids].reverse())
    assert.deepEqual((await all(Sandbox.list({ query: { metadata: { mark, i: '3' } } }))).map((b) => b.sandboxId), [made[3].sandboxId])
    assert.deepEqual(await all(Sandbox.list({ query: { metadata: { mark, i: '9' } } })), [])
    await made[1].pause()
    const states = async (state) => (await all(Sandbox.list({ query: { ...query, state } }))).map((b) => b.sandboxId)
    assert.deepEqual(await states(['paused']), [made[1].sandboxId])
    assert.deepEqual(await states(['running']), ids.filter((id) => id !== made[1].sandboxId))
    assert.deepEqual(await states(['running', 'paused']), ids)
    assert.equal((await all(Sandbox.list({ query: { ...query, template: 'base' } }))).length, 5)
    assert.equal((await all(Sandbox.list({ query: { ...query, template: 'other' } }))).length, 0)
    assert.equal((await all(Sandbox.list({ query: { ...query, startedAfter: new Date(Date.now() + 60_000) } }))).length, 0)
    assert.equal((await all(Sandbox.list({ query: { ...query, startedAfter: new Date(Date.now() - 600_000) } }))).length, 5)
    const item = (await all(Sandbox.list({ query: { ...query, state: ['paused'] } })))[0]
    assert.equal(item.state, 'paused')
    assert.equal(item.templateId, 'base')
    await assert.rejects(all(Sandbox.list({ nextToken: 'nonsense' })), SandboxError)
  } finally {
    await Promise.all(made.map((b) => b.kill()))
  }
})

test('a timeout ends it, and can be moved', async () => {
  const box = await Sandbox.create({ timeoutMs: 60_000 })
  await box.setTimeout(300_000)
  const far = (await box.getInfo()).endAt
  assert.ok(Math.abs(far - Date.now() - 300_000) < 10_000)
  const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 10_000 }) // never shortens
  assert.equal(+(await again.getInfo()).endAt, +far)
  assert.equal((await again.commands.run('echo hi')).stdout, 'hi\n')
  await box.connect({ timeoutMs: 600_000 })
  assert.ok((await box.getInfo()).endAt - Date.now() > 500_000)
  await box.setTimeout(1000)
  await until('its end', async () => !(await box.isRunning()))
  await assert.rejects(box.setTimeout(60_000), SandboxNotFoundError)
})

test('paused, it keeps its memory', async () => {
  await using({}, async (box) => {
    // Renamed into place: a download of a file that shrinks meanwhile breaks off.
    await box.commands.run('(i=0; while :; do i=$((i+1)); echo $i > /tmp/m; mv /tmp/m /tmp/n; sleep 0.02; done)', { background: true, timeoutMs: 0 })
    await box.commands.run('until [ -s /tmp/n ]; do sleep 0.05; done; python3 -c "import time,os\nopen(\'/dev/shm/k\',\'w\').write(\'kept\')"')
    const boot = (await box.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout
    assert.equal(await box.pause(), true)
    assert.equal(await box.pause(), false)
    assert.equal(await box.isRunning(), false)
    assert.equal((await box.getInfo()).state, 'paused')
    await assert.rejects(box.commands.run('true'))
    await assert.rejects(box.setTimeout(60_000), SandboxNotFoundError)
    const up = await Sandbox.connect(box.sandboxId, { timeoutMs: 90_000 })
    assert.equal(up.sandboxId, box.sandboxId)
    assert.equal(await box.isRunning(), true)
    const n = Number((await up.files.read('/tmp/n')).trim())
    await until('the loop goes on', async () => Number((await up.files.read('/tmp/n')).trim()) > n)
    assert.equal(await up.files.read('/dev/shm/k'), 'kept')
    assert.equal((await up.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout, boot)
    const left = (await up.getInfo()).endAt - Date.now()
    assert.ok(left > 60_000 && left < 100_000, `left: ${left}`)
  })
})

test('paused without memory, it keeps its files', async () => {
  await using({}, async (box) => {
    await box.files.write('f', 'on disk')
    const boot = (await box.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout
    await box.commands.run('sleep 1000', { background: true })
    assert.equal(await box.pause({ keepMemory: false }), true)
    assert.equal((await box.getInfo()).state, 'paused')
    await box.connect()
    assert.equal(await box.files.read('f'), 'on disk')
    assert.equal((await box.commands.list()).length, 0)
    assert.notEqual((await box.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout, boot)
    // And one that has its memory can be woken without.
    await box.commands.run('sleep 1000', { background: true })
    await box.pause()
    await Sandbox.connect(box.sandboxId, { onResume: 'reboot' })
    assert.equal((await box.commands.list()).length, 0)
    assert.equal(await box.files.read('f'), 'on disk')
  })
})

test('what becomes of it at its timeout', async () => {
  await using({ timeoutMs: 1500, lifecycle: { onTimeout: 'pause' } }, async (box) => {
    assert.deepEqual((await box.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: false })
    await until('it is paused', async () => (await box.getInfo()).state === 'paused')
    assert.equal(await box.isRunning(), false)
    await assert.rejects(box.commands.run('true')) // nothing wakes it
    assert.equal((await box.getInfo()).state, 'paused')
    await box.connect({ timeoutMs: 60_000 })
    assert.equal((await box.commands.run('echo up')).stdout, 'up\n')
  })
  await using({ timeoutMs: 10_000, lifecycle: { onTimeout: { action: 'pause', keepMemory: false } } }, async (box) => {
    await box.files.write('f', 'x')
    await until('it rests', async () => (await box.getInfo()).state === 'paused', 60_000)
    await box.connect({ timeoutMs: 60_000 })
    assert.equal(await box.files.read('f'), 'x')
  })
  await using({ timeoutMs: 10_000, lifecycle: { onTimeout: 'pause', autoResume: true } }, async (box) => {
    assert.deepEqual((await box.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
    await box.commands.run('python3 -m http.server 8000', { background: true, timeoutMs: 0, cwd: '/etc' })
    await until('it is paused', async () => (await box.getInfo()).state === 'paused', 60_000)
    assert.equal(await box.isRunning(), false) // to ask is not to use
    assert.equal((await box.commands.run('echo woken')).stdout, 'woken\n')
    await until('it is paused again', async () => (await box.getInfo()).state === 'paused', 60_000)
    const r = await until('its server', async () => {
      const r = await fetch(`${url}/hostname`, { headers: { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '8000' } })
      return r.status === 200 && r
    })
    assert.equal((await r.text()).trim().length > 0, true)
  })
})

test('metrics', async () => {
  await using({}, async (box) => {
    await box.commands.run('timeout 0.5 sh -c "while :; do :; done" || true')
    const m = await box.getMetrics()
    assert.equal(m.length >= 1, true)
    const last = m[m.length - 1]
    for (const k of ['cpuUsedPct', 'cpuCount', 'memUsed', 'memTotal', 'memCache', 'diskUsed', 'diskTotal']) assert.equal(typeof last[k], 'number', k)
    assert.ok(last.timestamp instanceof Date && Math.abs(last.timestamp - Date.now()) < 60_000)
    assert.ok(last.memTotal > 0)
    assert.deepEqual(await box.getMetrics({ end: new Date(Date.now() - 3600_000) }), [])
    await assert.rejects(Sandbox.getMetrics('sbaaaaaaaaaaaa'), SandboxNotFoundError)
  })
})

test('ports, open and closed', async () => {
  const at = (box, port, more = {}) => fetch(`${url}/hello`, { headers: { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': String(port), ...more } })
  const serve = (box) => box.commands.run(`mkdir -p w && echo served > w/hello && cd w && exec python3 -m http.server 8000`, { background: true, timeoutMs: 0 })
  await using({}, async (box) => {
    await serve(box)
    const r = await until('the server', async () => { const r = await at(box, 8000); return r.status === 200 && r })
    assert.equal(await r.text(), 'served\n')
    assert.equal((await at(box, 8001)).status, 502)
    assert.equal(box.trafficAccessToken, undefined)
  })
  await using({ network: { allowPublicTraffic: false } }, async (box) => {
    await serve(box)
    assert.ok(box.trafficAccessToken)
    const r = await until('the server', async () => { const r = await at(box, 8000, { 'E2b-Traffic-Access-Token': box.trafficAccessToken }); return r.status === 200 && r })
    assert.equal(await r.text(), 'served\n')
    assert.equal((await at(box, 8000)).status, 403)
    assert.equal((await at(box, 8000, { 'E2b-Traffic-Access-Token': 'guess' })).status, 403)
    assert.equal((await box.getInfo()).network.allowPublicTraffic, false)
  })
  await using({ network: { maskRequestHost: 'inner.example:${PORT}' } }, async (box) => {
    await box.files.write('s.py', `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(self.headers['Host'].encode())
http.server.HTTPServer(('', 8000), H).serve_forever()`)
    await box.commands.run('exec python3 s.py', { background: true, timeoutMs: 0 })
    const r = await until('the server', async () => { const r = await at(box, 8000); return r.status === 200 && r })
    assert.equal(await r.text(), 'inner.example:8000')
  })
})

test('what cannot be kept is refused', async () => {
  for (const [what, opts] of Object.entries({
    rules: { network: { rules: { 'api.example.com': [{ transform: { headers: { 'X-K': 'v' } } }] } } },
    proxy: { network: { egressProxy: { address: 'proxy.example.com:1080' } } },
    ports: { network: { httpsPorts: [8443] } },
    names: { network: { allowOut: ['example.com'], denyOut: ['8.8.8.8'] } },
    deny: { network: { denyOut: ['example.com'] } },
    metadata: { metadata: { 'sandboxd.e2b': '{}' } },
    iam: { iam: { tokens: { t: { audience: 'a', tokenType: 'urn:ietf:params:oauth:token-type:jwt' } } } },
    volume: { volumeMounts: { '/data': 'no-such-volume' } },
  })) {
    await assert.rejects(Sandbox.create({ timeoutMs: 5000, ...opts }).then((b) => b.kill()), SandboxError, what)
  }
})

test('one client with options of its own', async () => {
  if (!E2B) return
  const client = new E2B({ apiKey: process.env.E2B_API_KEY, apiUrl: url, sandboxUrl: process.env.E2B_SANDBOX_URL })
  const S = client.Sandbox ?? client.sandbox
  if (!S) return
  const box = await S.create({ timeoutMs: 60_000 })
  assert.equal((await box.commands.run('echo one')).stdout, 'one\n')
  await box.kill()
})

test('git', async () => {
  await using({}, async (box) => {
    if (!box.git) return
    await box.commands.run('mkdir -p remote && cd remote && git init -q -b main --bare')
    await box.git.init('repo', { initialBranch: 'main' })
    await box.git.configureUser('A User', 'a@example.com', { scope: 'local', path: '/home/user/repo' }).catch(async () => {
      await box.git.configureUser('A User', 'a@example.com')
    })
    await box.files.write('repo/f', '1')
    await box.git.add('/home/user/repo')
    await box.git.commit('/home/user/repo', 'first')
    const st = await box.git.status('/home/user/repo')
    assert.equal(st.currentBranch ?? st.branch, 'main')
    await box.git.createBranch('/home/user/repo', 'side')
    const b = await box.git.branches('/home/user/repo')
    assert.ok(b.branches.includes('side'))
    await box.git.remoteAdd('/home/user/repo', 'origin', '/home/user/remote')
    await box.commands.run('git push -q origin main', { cwd: '/home/user/repo' }).catch(() => box.commands.run('git push -q origin HEAD:main', { cwd: '/home/user/repo' }))
    await box.git.clone('/home/user/remote', { path: '/home/user/copy' })
    assert.equal(await box.files.read('copy/f'), '1')
  })
})
