package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/sandbox"
)

// completionTimeout keeps a dead daemon from hanging the shell.
const completionTimeout = 2 * time.Second

// completeSandbox offers names and ids.
func (c *cli) completeSandbox(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if cmd.ArgsLenAtDash() >= 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	page, err := cl.List(ctx, sandbox.Filter{Limit: sandbox.MaxPage})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, sb := range page.Items {
		if sb.Spec.Name != "" {
			words = append(words, sb.Spec.Name+"\t"+string(sb.ID)+" "+string(sb.Status))
		}
		words = append(words, string(sb.ID)+"\t"+string(sb.Status))
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}

// completeProcess offers a sandbox first, then its processes.
func (c *cli) completeProcess(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return c.completeSandbox(cmd, args, word)
	}
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	procs, err := cl.Processes(ctx, args[0])
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, p := range procs {
		words = append(words, string(p.ID)+"\t"+plain(p.Argv[0]))
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}

// completeImage offers image names.
func (c *cli) completeImage(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	images, err := cl.Images(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, i := range images {
		words = append(words, i.Name)
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}

func (c *cli) completeSnapshot(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
	defer cancel()
	all, err := cl.Snapshots(ctx, "")
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for _, s := range all {
		words = append(words, string(s.ID))
		if s.Name != "" {
			words = append(words, s.Name)
		}
	}
	return words, cobra.ShellCompDirectiveNoFileComp
}
