// Package guard is the daemon's manager as one caller may use it: what belongs
// to another owner is missing, what a role may not do is forbidden, and what an
// owner has stays within a quota. The caller is in the context (package
// access); work that no request brought passes unchecked. It keeps no state:
// owners stand on the objects themselves.
package guard
