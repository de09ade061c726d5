package api

import "github.com/sandboxd/sandboxd/cost"

// PriceList lists the price books, the earliest first.
type PriceList struct {
	Items []cost.Book `json:"items"`
}

// CancelEntryRequest says why an entry is cancelled.
type CancelEntryRequest struct {
	Reason string `json:"reason" minLength:"1" maxLength:"1024" doc:"Kept with the cancellation."`
}

// EntryList is one page of costs and revenue from outside, the newest first.
type EntryList struct {
	Items []cost.Posted `json:"items"`
	Next  int64         `json:"next,omitempty" doc:"Ask again with before=this; absent on the last page."`
}

// BudgetList lists the budgets, by target.
type BudgetList struct {
	Items []cost.BudgetState `json:"items"`
}
