"""Does every backend compute what the definition says, and would a defect show?"""
