// Terminals, through the SDK as it is published.
import { after, before, test } from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox } from 'e2b'

let box
before(async () => { box = await Sandbox.create({ timeoutMs: 300_000 }) })
after(async () => { await box?.kill() })

async function until(what, cond, ms = 20_000) {
  for (const end = Date.now() + ms; ;) {
    const v = await cond()
    if (v) return v
    if (Date.now() > end) assert.fail(`waited in vain: ${what()}`)
    await new Promise((r) => setTimeout(r, 30))
  }
}

// terminal opens a shell and gathers what it shows.
async function terminal(opts) {
  const t = { shown: '', text: new TextDecoder() }
  t.h = await box.pty.create({ cols: 80, rows: 24, timeoutMs: 0, ...opts, onData: (d) => { t.shown += t.text.decode(d, { stream: true }) } })
  t.type = (s) => box.pty.sendInput(t.h.pid, new TextEncoder().encode(s))
  t.shows = (s) => until(() => `${JSON.stringify(s)} in ${JSON.stringify(t.shown)}`, () => t.shown.includes(s))
  return t
}

test('a shell on a terminal', async () => {
  const t = await terminal({ cwd: '/tmp', envs: { WORD: 'given' } })
  await t.type('echo "<$WORD $(pwd) $(id -un) $TERM>"\n')
  await t.shows('<given /tmp user xterm-256color>')
  await t.type('stty size\n')
  await t.shows('24 80')
  await box.pty.resize(t.h.pid, { cols: 101, rows: 33 })
  await t.type('stty size; tput cols\n')
  await t.shows('33 101')
  await t.type('sleep 4242\n')
  await until(() => t.shown, async () => (await box.commands.run('pgrep -f "^sleep 4242" || true')).stdout !== '')
  await t.type('\x03')
  await t.type('echo "<code $?>"\n')
  await t.shows('<code 130>')
  await t.type('exit 5\n')
  await assert.rejects(t.h.wait(), (e) => e.exitCode === 5)
})

test('it can be left and taken up', async () => {
  const t = await terminal()
  await t.type('X=kept; echo "<$X>"\n')
  await t.shows('<kept>')
  await t.h.disconnect()
  let shown = ''
  const again = await box.pty.connect(t.h.pid, { timeoutMs: 0, onData: (d) => { shown += Buffer.from(d).toString() } })
  assert.equal(again.pid, t.h.pid)
  await t.type('echo "<$X again>"\n')
  await until(() => shown, () => shown.includes('<kept again>'))
  assert.equal(await box.pty.kill(t.h.pid), true)
  await assert.rejects(again.wait())
  assert.equal(await box.pty.kill(t.h.pid), false)
})
