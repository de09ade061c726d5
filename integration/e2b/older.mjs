// The oldest SDK that is served: what most programs do with it.
import { test } from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox } from 'e2b-2.45'

test('create, command, file, list, pause, kill', async () => {
  const box = await Sandbox.create({ timeoutMs: 60_000, metadata: { old: 'yes' } })
  assert.equal((await box.commands.run('echo hello; id -un')).stdout, 'hello\nuser\n')
  await box.files.write('f.txt', 'content')
  assert.equal(await box.files.read('f.txt'), 'content')
  assert.equal((await box.getInfo()).sandboxId, box.sandboxId)
  const found = await Sandbox.list({ query: { metadata: { old: 'yes' } } }).nextItems()
  assert.deepEqual(found.map((b) => b.sandboxId), [box.sandboxId])
  await box.pause()
  const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 60_000 })
  assert.equal(await again.files.read('f.txt'), 'content')
  await again.setTimeout(30_000)
  assert.equal(await again.kill(), true)
  assert.equal(await again.isRunning(), false)
})
