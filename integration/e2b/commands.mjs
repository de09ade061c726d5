// Commands, through the SDK as it is published.
import { after, before, test } from 'node:test'
import assert from 'node:assert/strict'
import { CommandExitError, Sandbox, TimeoutError } from 'e2b'

let box
before(async () => { box = await Sandbox.create({ timeoutMs: 300_000, envs: { SHARED: 'of the sandbox' } }) })
after(async () => { await box?.kill() })

// until waits for a condition.
async function until(what, cond, ms = 20_000) {
  for (const end = Date.now() + ms; ;) {
    const v = await cond()
    if (v) return v
    if (Date.now() > end) assert.fail(`waited in vain: ${what}`)
    await new Promise((r) => setTimeout(r, 30))
  }
}

test('a command says what it has to say', async () => {
  const out = [], errs = []
  const r = await box.commands.run('echo one; echo two >&2; printf "%s" "$SHARED $OWN"; pwd; id -un', {
    envs: { OWN: 'and of the command' }, onStdout: (s) => { out.push(s) }, onStderr: (s) => { errs.push(s) },
  })
  assert.equal(r.exitCode, 0)
  assert.equal(r.error, undefined)
  assert.equal(r.stdout, 'one\nof the sandbox and of the command/home/user\nuser\n')
  assert.equal(r.stderr, 'two\n')
  assert.equal(out.join(''), r.stdout)
  assert.equal(errs.join(''), r.stderr)
})

test('another user, another directory', async () => {
  const r = await box.commands.run('id -u; pwd; echo $HOME', { user: 'root', cwd: '/tmp' })
  assert.equal(r.stdout, '0\n/tmp\n/root\n')
  const rel = await box.commands.run('mkdir -p sub && cd sub && pwd')
  assert.equal(rel.stdout, '/home/user/sub\n')
  assert.equal((await box.commands.run('pwd', { cwd: 'sub' })).stdout, '/home/user/sub\n')
  await assert.rejects(box.commands.run('true', { cwd: '/not/there' }))
  await assert.rejects(box.commands.run('true', { user: 'nobody-knows' }))
})

test('an exit code that is not 0 is an error', async () => {
  await assert.rejects(box.commands.run('echo a; echo b >&2; exit 7'), (e) => {
    assert.ok(e instanceof CommandExitError)
    assert.equal(e.exitCode, 7)
    assert.equal(e.stdout, 'a\n')
    assert.equal(e.stderr, 'b\n')
    return true
  })
})

test('text of several bytes arrives whole', async () => {
  const r = await box.commands.run(`python3 -c "print('ä€😀' * 50000)"`)
  assert.equal(r.stdout, 'ä€😀'.repeat(50000) + '\n')
})

test('output comes while the command runs', async () => {
  const seen = []
  const h = await box.commands.run('echo early; until [ -e /tmp/go ]; do sleep 0.05; done; echo late', { background: true, onStdout: (s) => { seen.push(s) } })
  await until('the first line', () => seen.join('') === 'early\n')
  await box.commands.run('touch /tmp/go')
  await h.wait()
  assert.equal(seen.join(''), 'early\nlate\n')
})

test('a command in the background, with its pid inside', async () => {
  const h = await box.commands.run('echo $$; exec sleep 100', { background: true })
  await until('its pid', () => h.stdout !== '')
  assert.equal(h.stdout.trim(), String(h.pid))
  assert.ok((await box.commands.list()).some((p) => p.pid === h.pid && p.cmd === '/bin/bash' && p.args.join(' ').includes('sleep 100')))
  assert.equal(await h.kill(), true)
  await assert.rejects(h.wait(), CommandExitError)
  await until('it is off the list', async () => !(await box.commands.list()).some((p) => p.pid === h.pid))
  assert.equal(await box.commands.kill(h.pid), false)
})

test('input, in order, to its end', async () => {
  const h = await box.commands.run('cat', { background: true, stdin: true })
  for (let i = 0; i < 20; i++) await box.commands.sendStdin(h.pid, `${i}\n`)
  await h.sendStdin(new Uint8Array([0xc3, 0xa4]))
  await h.closeStdin()
  const r = await h.wait()
  assert.equal(r.stdout, Array.from({ length: 20 }, (_, i) => `${i}\n`).join('') + 'ä')
  assert.equal((await box.commands.run('cat')).stdout, '') // none was asked for
})

test('the time a command may take', async () => {
  const mark = `mark-${Date.now()}`
  await assert.rejects(box.commands.run(`exec -a ${mark} sleep 100`, { timeoutMs: 700 }), TimeoutError)
  await until('it is dead', async () => !(await box.commands.run(`pgrep -f [m]${mark.slice(1)} || true`)).stdout.trim())
})

test('one that lost its client goes on, and takes another', async () => {
  const h = await box.commands.run('trap "echo told; exit 0" USR1; echo ready; while :; do sleep 0.1; done', { background: true, timeoutMs: 0 })
  await until('it is ready', () => h.stdout.includes('ready'))
  await h.disconnect()
  const again = await box.commands.connect(h.pid)
  assert.equal(again.pid, h.pid)
  await box.commands.run(`kill -USR1 ${h.pid}`)
  const r = await again.wait()
  assert.equal(r.stdout, 'told\n')
  await assert.rejects(box.commands.connect(h.pid))
})

test('several at once', async () => {
  const all = await Promise.all(Array.from({ length: 12 }, (_, i) => box.commands.run(`echo ${i}`)))
  assert.deepEqual(all.map((r) => r.stdout.trim()), Array.from({ length: 12 }, (_, i) => String(i)))
})

test('what the default image has', async () => {
  const r = await box.commands.run('git --version && python --version && python3 -c "print(1)" && curl --version | head -1 && realpath . && tput -T xterm-256color cols >/dev/null && echo $SHELL')
  assert.match(r.stdout, /git version/)
  assert.match(r.stdout, /\/home\/user\n\/bin\/bash\n$/)
})

test('sudo without a password', async () => {
  const r = await box.commands.run('echo in | VAR=v sudo -E sh -c \'id -u; pwd; echo $HOME $VAR $SUDO_USER; cat; exit 3\' || echo $?')
  assert.equal(r.stdout, '0\n/home/user\n/root v user\nin\n3\n')
  assert.equal((await box.commands.run('sudo -u user id -un; sudo A=b printenv A')).stdout, 'user\nb\n')
  await assert.rejects(box.commands.run('cat /etc/shadow'), CommandExitError)
  assert.match((await box.commands.run('sudo cat /etc/shadow')).stdout, /^user:/m)
  await assert.rejects(box.commands.run('sudo id', { user: 'nobody', cwd: '/' }), (e) => /not in the group sudo/.test(e.stderr))
  assert.match((await box.commands.run('sudo grep NoNewPrivs: /proc/self/status')).stdout, /1\n/)
  // It ends with whoever asked.
  const h = await box.commands.run('sudo bash -c "exec -a sudo-child sleep 100"', { background: true })
  await until('it runs', async () => (await box.commands.run('pgrep -f ^sudo-child || true')).stdout.trim())
  await h.kill()
  await until('it is dead', async () => !(await box.commands.run('pgrep -f ^sudo-child || true')).stdout.trim())
})

test('a sandbox that is killed breaks its streams', async () => {
  const other = await Sandbox.create({ timeoutMs: 60_000 })
  const h = await other.commands.run('sleep 100', { background: true })
  assert.equal(await other.isRunning(), true)
  await other.kill()
  await assert.rejects(h.wait(), TimeoutError)
  assert.equal(await other.isRunning(), false)
  await assert.rejects(other.commands.run('true'))
})
