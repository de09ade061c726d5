// Package testenv tells tests what the machine they run on can do.
//
// A test that depends on the machine names the features it needs:
//
//	testenv.Need(t, testenv.Root, testenv.CgroupControllers)
//
// Each feature is probed once per test binary, by using it rather than by
// looking for signs of it. What is missing skips the test, with the reason,
// unless SANDBOXD_TEST_PROMISES (a comma list of feature names, "root,cgroup")
// says that this run has it: then the test fails. So a skip can never hide
// what a lane was built to cover.
//
// The package changes nothing that outlives the probe, with one exception: on
// a host whose cgroup v2 root offers the controllers, probing them enables
// them for the root's children, as the daemon does. Only tests import it.
package testenv
