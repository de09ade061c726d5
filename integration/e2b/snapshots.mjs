// Snapshots and forks, through the SDK as it is published.
import { test } from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox, SandboxError, SandboxNotFoundError, Template } from 'e2b'

async function all(paginator) {
  const out = []
  while (paginator.hasNext) out.push(...(await paginator.nextItems()))
  return out
}

test('a snapshot is a template', async () => {
  const box = await Sandbox.create({ timeoutMs: 120_000, metadata: { of: 'snapshots' } })
  const made = []
  try {
    await box.files.write('/home/user/state', 'one')
    const one = await box.createSnapshot()
    assert.match(one.snapshotId, /^sn/)
    await box.files.write('/home/user/state', 'two')
    const name = `named-${process.pid}`
    const two = await box.createSnapshot({ name })
    assert.ok(two.names.includes(name))
    await box.files.write('/home/user/state', 'three')

    for (const [template, want] of [[one.snapshotId, 'one'], [two.snapshotId, 'two'], [name, 'two']]) {
      const copy = await Sandbox.create(template, { timeoutMs: 300_000 })
      made.push(copy)
      assert.equal(await copy.files.read('/home/user/state'), want)
      assert.equal((await copy.getInfo()).templateId, template)
    }
    assert.equal(await box.files.read('/home/user/state'), 'three')
    const mine = await all(box.listSnapshots())
    assert.deepEqual(mine.map((s) => s.snapshotId), [two.snapshotId, one.snapshotId])
    assert.deepEqual((await all(Sandbox.listSnapshots({ name }))).map((s) => s.snapshotId), [two.snapshotId])
    assert.equal((await all(Sandbox.listSnapshots({ sandboxId: box.sandboxId, limit: 1 }))).length, 2)
    assert.equal(await Template.exists(name), true)
    assert.equal(await Template.exists('never-made'), false)

    // A name that is taken again means the newer one.
    await box.files.write('/home/user/state', 'four')
    const four = await box.createSnapshot({ name })
    const copy = await Sandbox.create(name, { timeoutMs: 300_000 })
    made.push(copy)
    assert.equal(await copy.files.read('/home/user/state'), 'four')

    assert.equal(await Sandbox.deleteSnapshot(one.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(one.snapshotId), false)
    assert.equal(await Sandbox.deleteSnapshot(two.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(name), true)
    assert.equal(await Sandbox.deleteSnapshot(name), false)
    assert.deepEqual(await all(box.listSnapshots()), [])
    await assert.rejects(Sandbox.create(four.snapshotId), SandboxError)
    assert.equal(await made[0].files.read('/home/user/state'), 'one') // those made of it live on
  } finally {
    await Promise.all([box, ...made].map((b) => b.kill()))
  }
})

test('forks', async () => {
  const box = await Sandbox.create({ timeoutMs: 120_000, metadata: { of: 'forks' }, envs: { E: 'kept' } })
  let forks = []
  try {
    await box.files.write('/home/user/state', 'shared')
    forks = await box.fork({ count: 3, timeoutMs: 60_000 })
    assert.equal(forks.length, 3)
    for (const [i, f] of forks.entries()) {
      assert.ok(f instanceof Sandbox, String(f))
      assert.equal(await f.files.read('/home/user/state'), 'shared')
      assert.equal((await f.commands.run('echo $E')).stdout, 'kept\n')
      await f.files.write('/home/user/state', `fork ${i}`)
    }
    assert.equal(await box.files.read('/home/user/state'), 'shared')
    assert.equal(await forks[0].files.read('/home/user/state'), 'fork 0')
    assert.equal(new Set([box, ...forks].map((b) => b.sandboxId)).size, 4)
    const left = (await forks[0].getInfo()).endAt - Date.now()
    assert.ok(left > 30_000 && left < 65_000, `left: ${left}`)
    assert.equal((await Sandbox.fork(box.sandboxId).then((f) => (forks.push(...f), f))).length, 1)
    await assert.rejects(box.fork({ count: 0 }), SandboxError)
    await assert.rejects(Sandbox.fork('sbaaaaaaaaaaaa'), SandboxNotFoundError)
  } finally {
    await Promise.all([box, ...forks].map((b) => b.kill?.()))
  }
})
