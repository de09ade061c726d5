package sandbox

import "strings"

// projectPrefix begins the id of every project.
const projectPrefix = "prj_"

// ValidateProject checks the form of a project's id: prj_ and up to 59 of a-z,
// 0-9, '-' and '_'. Class ErrInvalid.
func ValidateProject(s string) error {
	rest, ok := strings.CutPrefix(s, projectPrefix)
	ok = ok && rest != "" && len(s) <= 63
	for _, c := range []byte(rest) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_')
	}
	if !ok {
		return Errorf(ErrInvalid, "invalid_project", "project %.70q: use %s and 1 to 59 of a-z, 0-9, '-' and '_'", s, projectPrefix)
	}
	return nil
}
