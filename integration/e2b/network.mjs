// What a sandbox may reach, through the SDK as it is published. The test lays
// an internet around the daemon in which every host answers on every port.
import { test } from 'node:test'
import assert from 'node:assert/strict'
import { ALL_TRAFFIC, Sandbox } from 'e2b'

async function reaches(box, host) {
  const r = await box.commands.run(`timeout 10 bash -c 'exec 3<>/dev/tcp/${host}/443' 2>/dev/null && echo yes || echo no`)
  return r.stdout.trim() === 'yes'
}

async function using(opts, f) {
  const box = await Sandbox.create({ timeoutMs: 120_000, ...opts })
  try { await f(box) } finally { await box.kill() }
}

// is checks which of three hosts a sandbox reaches.
async function is(box, want) {
  const got = {}
  for (const host of Object.keys(want)) got[host] = await reaches(box, host)
  assert.deepEqual(got, want)
}

test('by itself, the internet and nothing private', () => using({}, async (box) => {
  await is(box, { '8.8.4.4': true, '1.1.1.1': true, '10.9.8.7': false, '169.254.169.254': false })
  assert.equal((await box.getInfo()).network, undefined)
}))

test('no internet access', () => using({ allowInternetAccess: false }, async (box) => {
  await is(box, { '8.8.4.4': false, '1.1.1.1': false })
  assert.equal((await box.getInfo()).allowInternetAccess, false)
  if (!box.updateNetwork) return
  await box.updateNetwork({ allowInternetAccess: true }) // the control
  await is(box, { '8.8.4.4': true, '1.1.1.1': true })
}))

test('all but what is denied', () => using({ network: { denyOut: ['8.8.4.0/24'] } }, async (box) => {
  await is(box, { '8.8.4.4': false, '1.1.1.1': true })
  assert.deepEqual((await box.getInfo()).network.denyOut, ['8.8.4.0/24'])
}))

test('what is allowed wins over what is denied', () => using({ network: { denyOut: ['8.8.0.0/16'], allowOut: ['8.8.4.4'] } }, async (box) => {
  await is(box, { '8.8.4.4': true, '8.8.4.5': false, '8.8.9.9': false, '1.1.1.1': true })
}))

test('nothing but what is allowed', () => using({ network: { denyOut: [ALL_TRAFFIC], allowOut: ['1.1.1.1'] } }, async (box) => {
  await is(box, { '8.8.4.4': false, '1.1.1.1': true })
  const n = (await box.getInfo()).network
  assert.deepEqual(n.allowOut, ['1.1.1.1'])
  assert.deepEqual(n.denyOut, [ALL_TRAFFIC])
  if (!box.updateNetwork) return
  await box.updateNetwork({ denyOut: ({ allTraffic }) => [allTraffic], allowOut: ['8.8.4.4'] })
  await is(box, { '8.8.4.4': true, '1.1.1.1': false })
  await box.updateNetwork({})
  await is(box, { '8.8.4.4': true, '1.1.1.1': true })
  await assert.rejects(box.updateNetwork({ egressProxy: { address: 'a.example:1080' } }))
  await is(box, { '8.8.4.4': true })
}))
