# Puts one fault of a list into a tree: `perl faults.pl LIST NUMBER TREE`. Prints its kind and its
# models; fails if there are not so many faults.
use strict;
use warnings;

my ($list, $number, $tree) = @ARGV;
local $/ = undef;
open(my $in, '<', $list) or die "$list: $!";
my @faults = split /^(?=\? )/m, <$in> =~ s/^#.*\n//mgr;
@faults = grep { /\S/ } @faults;
exit 1 if $number > @faults;

my ($head, @hunks) = split /^\@ /m, $faults[$number - 1];
my ($kind, $models) = $head =~ /^\? (\w+) (.*)$/m or die "$list: fault $number has no head\n";
for (@hunks) {
    my ($file, $change) = /^([^\n]+)\n(.*)/s or die "$list: fault $number has no file\n";
    my $old = join '', map { "$_\n" } $change =~ /^-(.*)$/mg;
    my $new = join '', map { "$_\n" } $change =~ /^\+(.*)$/mg;
    open(my $source, '<', "$tree/$file") or die "$file: $!";
    my $text = <$source>;
    my $times = () = $text =~ /\Q$old\E/g;
    die "$list: fault $number stands $times times in $file:\n$old" if $times != 1;
    $text =~ s/\Q$old\E/$new/;
    open(my $out, '>', "$tree/$file") or die "$file: $!";
    print $out $text;
    close($out) or die "$file: $!";
}
print "$kind $models\n";
