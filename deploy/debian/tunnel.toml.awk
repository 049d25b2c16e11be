# Makes the man page tunnel.toml(5) of the reference of settings:
#   awk -v version=VERSION -f deploy/debian/tunnel.toml.awk docs/reference/config.md
BEGIN {
    print ".TH TUNNEL.TOML 5 \"\" \"tunnel " version "\" \"File formats\""
    print ".SH NAME\ntunnel.toml \\- config of servers, edges and users of tunnel"
    print ".SH DESCRIPTION"
    print ".B tunnel server\nreads\n.I /etc/tunnel/server.toml\nand\n.B tunnel edge\nreads\n.IR /etc/tunnel/edge.toml ,"
    print "unless\n.B \\-c\nnames another file. Programs of users read\n.IR ~/.config/tunnel/client.toml ."
    print "All are TOML, with the tables and keys below. An unknown key is an error."
    print ".PP\n.B tunnel config check\nFILE reports every error in a file,"
    print "and\n.B tunnel config show\nFILE prints all values in effect."
}

# roff(TEXT): returns Markdown as text of a man page.
function roff(text) {
    gsub(/`/, "", text)
    gsub(/\\\*/, "*", text)
    gsub(/\\/, "\\e", text)
    gsub(/-/, "\\-", text)
    sub(/^[.']/, "\\\\\\&&", text)
    return text
}

/^### / { print ".SS " roff(substr($0, 5)); next }
/^## / { print ".SH " roff(substr($0, 4)); has_begun = 1; next }
has_begun { print /^$/ ? ".PP" : roff($0) }

END {
    print ".SH FILES\n.I /usr/share/doc/tunnel/*.toml\n.br\nexamples to start from\n.PP"
    print ".I /usr/share/doc/tunnel/*.schema.json\n.br\nJSON Schemas for editors"
    print ".SH SEE ALSO\n.BR tunnel (1)"
}
