// Files, watches and signed URLs, through the SDK as it is published.
import { after, before, test } from 'node:test'
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { FileNotFoundError, Sandbox } from 'e2b'

let box
before(async () => { box = await Sandbox.create({ timeoutMs: 300_000 }) })
after(async () => { await box?.kill() })

async function until(what, cond, ms = 20_000) {
  for (const end = Date.now() + ms; ;) {
    const v = await cond()
    if (v) return v
    if (Date.now() > end) assert.fail(`waited in vain: ${what}`)
    await new Promise((r) => setTimeout(r, 30))
  }
}

test('written and read', async () => {
  const info = await box.files.write('a/b/c.txt', 'hello ä')
  assert.equal(info.path, '/home/user/a/b/c.txt')
  assert.equal(info.name, 'c.txt')
  assert.equal(info.type, 'file')
  assert.equal(await box.files.read('/home/user/a/b/c.txt'), 'hello ä')
  assert.equal((await box.commands.run('stat -c "%U %G %a" a a/b a/b/c.txt')).stdout, 'user user 755\nuser user 755\nuser user 644\n')
  await box.files.write('/etc/app/conf', 'x') // an agent's rights, the user's file
  assert.equal((await box.commands.run('stat -c %U /etc/app /etc/app/conf')).stdout, 'user\nuser\n')
  await box.files.write('/root/r', 'of root', { user: 'root' })
  assert.equal((await box.commands.run('stat -c %U /root/r', { user: 'root' })).stdout, 'root\n')
  await box.files.write('a/b/c.txt', 'shorter')
  assert.equal(await box.files.read('a/b/c.txt'), 'shorter')
})

test('empty ones, in every form', async () => {
  await box.files.write('empty', '')
  assert.equal(await box.files.read('empty'), '')
  assert.equal((await box.files.read('empty', { format: 'bytes' })).length, 0)
  assert.equal((await box.files.read('empty', { format: 'blob' })).size, 0)
})

test('bytes, blobs and streams', async () => {
  const bytes = new Uint8Array(100_000).map((_, i) => i * 7)
  await box.files.write('bytes', bytes.buffer)
  assert.deepEqual(await box.files.read('bytes', { format: 'bytes' }), bytes)
  await box.files.write('blob', new Blob([bytes]))
  assert.deepEqual(new Uint8Array(await (await box.files.read('blob', { format: 'blob' })).arrayBuffer()), bytes)
  await box.files.write('stream', new Blob([bytes]).stream())
  const parts = []
  for await (const p of await box.files.read('stream', { format: 'stream' })) parts.push(p)
  assert.deepEqual(new Uint8Array(Buffer.concat(parts)), bytes)
  await box.files.write('packed', 'p'.repeat(50_000), { gzip: true })
  assert.equal(await box.files.read('packed', { gzip: true }), 'p'.repeat(50_000))
})

test('several at once', async () => {
  const got = await box.files.write([{ path: 'm/one.txt', data: '1' }, { path: '/home/user/m/deep/two "q" ü.txt', data: '2' }])
  assert.deepEqual(got.map((f) => f.path), ['/home/user/m/one.txt', '/home/user/m/deep/two "q" ü.txt'])
  assert.equal(await box.files.read('m/deep/two "q" ü.txt'), '2')
})

test('what is not there', async () => {
  await assert.rejects(box.files.read('/nothing'), FileNotFoundError)
  await assert.rejects(box.files.getInfo('/nothing'), FileNotFoundError)
  await assert.rejects(box.files.list('/nothing'), FileNotFoundError)
  await assert.rejects(box.files.rename('/nothing', '/x'), FileNotFoundError)
  assert.equal(await box.files.exists('/nothing'), false)
  await box.files.remove('/nothing')
  await assert.rejects(box.files.read('/home/user'))
  await assert.rejects(box.files.write('/home/user', 'x'))
})

test('directories', async () => {
  assert.equal(await box.files.makeDir('d/e/f'), true)
  assert.equal(await box.files.makeDir('d/e/f'), false)
  await box.files.write('d/e/file', 'content')
  await box.commands.run('ln -s e/file d/link && ln -s nowhere d/dead && chmod 4750 d/e/file')
  const flat = await box.files.list('d')
  assert.deepEqual(flat.map((e) => e.name), ['e', 'link']) // the SDK leaves out what leads nowhere
  const deep = await box.files.list('/home/user/d', { depth: 2 })
  assert.deepEqual(deep.map((e) => e.path.slice('/home/user/d/'.length)), ['e', 'e/f', 'e/file', 'link'])
  const link = flat.find((e) => e.name === 'link')
  assert.equal(link.type, 'file')
  assert.equal(link.symlinkTarget, '/home/user/d/e/file')
  await assert.rejects(box.files.list('d', { depth: 0 }))

  const info = await box.files.getInfo('d/e/file')
  assert.equal(info.size, 7)
  assert.equal(info.owner, 'user')
  assert.equal(info.group, 'user')
  assert.equal(info.mode, 0o750)
  assert.equal(info.permissions, 'urwxr-x---')
  assert.ok(Math.abs(info.modifiedTime - Date.now()) < 600_000)
  assert.equal((await box.files.getInfo('d')).type, 'dir')
  assert.equal((await box.files.getInfo('d')).permissions, 'drwxr-xr-x')

  const moved = await box.files.rename('d/e/file', 'd/new/place')
  assert.equal(moved.path, '/home/user/d/new/place')
  assert.equal(await box.files.exists('d/e/file'), false)
  assert.equal(await box.files.read('d/new/place'), 'content')
  await box.files.remove('d')
  assert.equal(await box.files.exists('d'), false)
})

test('metadata of files', async (t) => {
  let info
  try {
    info = await box.files.write('meta', 'x', { metadata: { Author: 'me', 'k-2': 'v w' } })
  } catch (e) {
    if (/metadata/i.test(String(e)) && !box.files.write.length) return t.skip('this SDK has none')
    throw e
  }
  if (!info.metadata) return t.skip('this SDK has none')
  assert.deepEqual(info.metadata, { author: 'me', 'k-2': 'v w' })
  assert.deepEqual((await box.files.getInfo('meta')).metadata, info.metadata)
  await box.files.write('meta', 'y')
  assert.equal((await box.files.getInfo('meta')).metadata, undefined)
})

test('100 MiB there and back', async () => {
  const block = new Uint8Array(1 << 20).map((_, i) => (i * 31) >> 3)
  const sum = createHash('sha256')
  const n = 100
  let sent = 0
  const body = new ReadableStream({
    pull(c) {
      if (sent++ === n) return c.close()
      block[0] = sent
      const b = block.slice()
      sum.update(b)
      c.enqueue(b)
    },
  })
  await box.files.write('big', body)
  const want = sum.digest('hex')
  assert.equal((await box.commands.run('sha256sum < big')).stdout.split(' ')[0], want)
  const back = createHash('sha256')
  let got = 0
  for await (const p of await box.files.read('big', { format: 'stream' })) { back.update(p); got += p.length }
  assert.equal(got, n << 20)
  assert.equal(back.digest('hex'), want)
  await box.files.remove('big')
})

test('a watch', async () => {
  await box.files.makeDir('w')
  const events = []
  let ended = 0
  const h = await box.files.watchDir('w', (e) => { events.push(e) }, { onExit: () => { ended++ } })
  const saw = (type, name) => until(`${type} ${name} in ${JSON.stringify(events)}`, () => events.some((e) => e.type === type && e.name === name))
  await box.files.write('w/new', '1')
  await saw('create', 'new')
  await box.commands.run('echo 2 >> w/new && chmod 600 w/new && mv w/new w/newer && rm w/newer')
  await saw('write', 'new')
  await saw('chmod', 'new')
  await saw('rename', 'new')
  await saw('create', 'newer')
  await saw('remove', 'newer')
  await box.files.write('w/over', 'first')
  await saw('write', 'over')
  events.length = 0
  await box.files.write('w/over', 'second')
  await saw('write', 'over')
  assert.deepEqual([...new Set(events.map((e) => e.name))], ['over'])
  await box.commands.run('mkdir -p w/sub && touch w/sub/deep && touch w/last')
  await saw('create', 'last')
  assert.ok(!events.some((e) => e.name.includes('deep')), 'a watch of one directory told of another')
  await h.stop()
  await until('the end is told', () => ended === 1)
  await assert.rejects(box.files.watchDir('/nothing', () => {}), FileNotFoundError)
  await assert.rejects(box.files.watchDir('/etc/passwd', () => {}))
})

test('a watch of a whole tree', async () => {
  await box.files.makeDir('t/x')
  const events = []
  const h = await box.files.watchDir('t', (e) => { events.push(e) }, { recursive: true, includeEntry: true })
  await box.commands.run('echo 1 > t/x/one; mkdir -p t/y/z; echo 2 > t/y/z/two')
  for (const name of ['x/one', 'y', 'y/z', 'y/z/two']) await until(`${name} in ${JSON.stringify(events)}`, () => events.some((e) => e.type === 'create' && e.name === name))
  const one = events.find((e) => e.name === 'x/one')
  if ('entry' in one) assert.equal(one.entry.path, '/home/user/t/x/one')
  await h.stop()
})

test('signed URLs', async () => {
  await box.files.write('s.txt', 'signed')
  const down = await box.downloadUrl('s.txt', { useSignatureExpiration: 60 })
  assert.match(down, /signature=v1_/)
  assert.equal(await (await fetch(down)).text(), 'signed')
  assert.equal(await (await fetch(await box.downloadUrl('s.txt'))).text(), 'signed')
  assert.equal((await fetch(down.replace('s.txt', 'other'))).status >= 400, true)
  const late = await fetch(await box.downloadUrl('s.txt', { useSignatureExpiration: -60 }))
  assert.equal(late.status, 401)
  assert.deepEqual(await late.json(), { code: 401, message: 'signature is already expired' })
  const bare = new URL(down)
  bare.searchParams.delete('signature')
  assert.ok((await fetch(bare)).status >= 400)

  const form = new FormData()
  form.append('file', new Blob(['uploaded']), 'x.txt')
  const up = await fetch(await box.uploadUrl('u/x.txt', { useSignatureExpiration: 60 }), { method: 'POST', body: form })
  assert.equal(up.status, 200)
  assert.equal(await box.files.read('u/x.txt'), 'uploaded')
  assert.equal((await fetch(await box.downloadUrl('s.txt'), { method: 'POST', body: form })).status >= 400, true)
})
