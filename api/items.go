package api

import (
	"bufio"
	"encoding/json"
	"net/http"
	"runtime"
	"time"
)

// itemsTime is how long a client may take to receive a list.
const itemsTime = 2 * time.Minute

// ItemWriter answers a request with an object of one field, a list, whose
// items are sent as they come.
type ItemWriter struct {
	w     http.ResponseWriter
	buf   *bufio.Writer
	field string
	items int
	begun bool
}

// NewItemWriter returns a writer that has not written anything yet.
func NewItemWriter(w http.ResponseWriter, field string) *ItemWriter {
	return &ItemWriter{w: w, field: field}
}

// Begun tells whether the answer has begun: an error can then only be told by
// breaking the connection.
func (l *ItemWriter) Begun() bool { return l.begun }

func (l *ItemWriter) begin() {
	l.begun = true
	l.w.Header().Set("Content-Type", "application/json")
	_ = http.NewResponseController(l.w).SetWriteDeadline(time.Now().Add(itemsTime)) // recorders of tests have none
	l.w.WriteHeader(http.StatusOK)
	l.buf = bufio.NewWriterSize(l.w, 16<<10)
	_, _ = l.buf.WriteString(`{"` + l.field + `":[`) // an error stays until Flush
}

// Add sends an item.
func (l *ItemWriter) Add(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if !l.begun {
		l.begin()
	} else {
		_ = l.buf.WriteByte(',') // as above
	}
	const turn = 64
	if l.items++; l.items%turn == 0 {
		runtime.Gosched() // lists are long, and others have short work to do
	}
	_, err = l.buf.Write(b)
	return err
}

// End sends the rest.
func (l *ItemWriter) End() error {
	if !l.begun {
		l.begin()
	}
	_, _ = l.buf.WriteString("]}\n") // as above
	err := l.buf.Flush()
	_ = http.NewResponseController(l.w).SetWriteDeadline(time.Time{}) // for the next request
	return err
}
