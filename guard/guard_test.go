package guard

import (
	"reflect"
	"testing"
)

// TestNothingPassesByItself: what is embedded would let methods through that
// nobody has thought about.
func TestNothingPassesByItself(t *testing.T) {
	for _, v := range []any{Manager{}, Lab{}, readOnly{}} {
		typ := reflect.TypeOf(v)
		for f := range typ.Fields() {
			if f.Anonymous {
				t.Errorf("%s embeds %s: give it each method by hand", typ, f.Type)
			}
		}
	}
}
